#include "optim/cuda/cuda_kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_step.h"

namespace tessera {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

class EventMark : public DeviceKernels::Mark {
 public:
  explicit EventMark(cudaStream_t stream) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  ~EventMark() override { cudaEventDestroy(event_); }

  bool passed() override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // no error that the next launch should find
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }
  void wait() override { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Events to be used again: making one costs more than recording it.
struct TimingEvents {
  ~TimingEvents() {
    for (cudaEvent_t event : spare) cudaEventDestroy(event);
  }
  cudaEvent_t take() {
    cudaEvent_t event = nullptr;
    if (spare.empty()) {
      check(cudaEventCreate(&event), "cudaEventCreate");
    } else {
      event = spare.back();
      spare.pop_back();
    }
    return event;
  }
  std::vector<cudaEvent_t> spare;
};

class EventInterval : public DeviceKernels::Interval {
 public:
  EventInterval(std::shared_ptr<TimingEvents> events, cudaStream_t stream)
      : events_(std::move(events)), stream_(stream), begin_(events_->take()), end_(events_->take()) {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
  }
  ~EventInterval() override { events_->spare.insert(events_->spare.end(), {begin_, end_}); }

  void end() noexcept override { ended_ = cudaEventRecord(end_, stream_); }
  double seconds() override {
    check(ended_, "cudaEventRecord");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds / 1e3;
  }

 private:
  const std::shared_ptr<TimingEvents> events_;
  const cudaStream_t stream_;
  const cudaEvent_t begin_, end_;
  cudaError_t ended_ = cudaSuccess;
};

class CudaKernels : public DeviceKernels {
 public:
  explicit CudaKernels(std::function<cudaStream_t()> current_stream) : stream_(std::move(current_stream)) {}

  std::size_t norm_scratch_bytes(std::uint64_t numel) const override { return cuda::norm_scratch_bytes(numel); }
  void norm_nodes(const float* shard, std::uint64_t numel, std::uint64_t first_block, NormNode* nodes,
                  std::size_t max_nodes, void* scratch) override {
    check(cuda::norm_nodes(shard, numel, first_block, nodes, max_nodes, scratch, stream_()), "norm_nodes");
  }
  void decide(const StepRequest& request, const StepTables& t) override {
    const cudaStream_t stream = stream_();
    check(cuda::read_messages(t, stream), "read_messages");
    check(cuda::combine_norm(t.nodes, t.first_node, t.group_blocks, t.groups, t.node_scratch, t.group_sums,
                             t.sum_of_squares, stream),
          "combine_norm");
    check(cuda::decide_step(request, t, stream), "decide_step");
  }
  void update(const DeviceRun& run, const StepTables& tables) override {
    check(cuda::update_step(run, tables, stream_()), "update_step");
  }

  std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, std::max<std::size_t>(bytes, 1)), "cudaMallocHost");
    std::memset(memory, 0, bytes);
    return {static_cast<std::byte*>(memory), [](std::byte* pinned) { cudaFreeHost(pinned); }};
  }
  void upload(void* device, const std::byte* pinned, std::size_t bytes) override {
    check(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream_()), "cudaMemcpyAsync to the device");
  }
  void download(std::byte* pinned, const void* device, std::size_t bytes) override {
    check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream_()), "cudaMemcpyAsync from the device");
  }
  std::unique_ptr<Mark> mark() override { return std::make_unique<EventMark>(stream_()); }
  std::unique_ptr<Interval> begin_interval() override { return std::make_unique<EventInterval>(events_, stream_()); }

 private:
  const std::function<cudaStream_t()> stream_;
  const std::shared_ptr<TimingEvents> events_ = std::make_shared<TimingEvents>();
};

}  // namespace

std::unique_ptr<DeviceKernels> cuda_kernels(std::function<cudaStream_t()> current_stream) {
  return std::make_unique<CudaKernels>(std::move(current_stream));
}

}  // namespace tessera
