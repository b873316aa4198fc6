#include "optim/cuda/cuda_kernels.h"

#include <absl/base/thread_annotations.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "optim/cuda/device_adafactor.h"
#include "optim/cuda/device_codec.h"
#include "optim/cuda/device_layers.h"
#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_outer.h"
#include "optim/cuda/device_signs.h"
#include "optim/cuda/device_step.h"
#include "runtime/base/mutex.h"

// This file implements DeviceKernels with CUDA. Kernels run on LibTorch's current stream. Copies have three streams of
// their own: one for copies to the device, one for copies from the device, and one for `fetch`. The kernels that encode
// and decode values on their way to and from the host run on the streams of these copies. A mark is an event. Events
// come from a pool, since making one costs more than recording it.

namespace tessera {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr std::size_t kPageBytes = 4096;

/// Returns the number of bytes from `memory` to the beginning of the next page.
std::size_t to_page(const std::byte* memory) {
  return (kPageBytes - reinterpret_cast<std::uintptr_t>(memory) % kPageBytes) % kPageBytes;
}

/// Returns pinned memory. Small pieces may begin at any address, since CUDA cuts them from larger pieces.
std::shared_ptr<std::byte> pinned(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
  return {static_cast<std::byte*>(memory), [](std::byte* given) { cudaFreeHost(given); }};
}

/// A pool of events, since making one costs more than recording it. An event returns to the pool when its mark is
/// destroyed, which any thread may do.
class Events {
 public:
  explicit Events(unsigned flags) : flags_(flags) {}
  ~Events() {
    for (cudaEvent_t event : spare_) cudaEventDestroy(event);
  }
  cudaEvent_t take() {
    const MutexLock lock(mutex_);
    cudaEvent_t event = nullptr;
    if (spare_.empty()) {
      check(cudaEventCreateWithFlags(&event, flags_), "cudaEventCreate");
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    return event;
  }
  void give_back(cudaEvent_t event) {
    const MutexLock lock(mutex_);
    spare_.push_back(event);
  }

 private:
  const unsigned flags_;
  Mutex mutex_;
  std::vector<cudaEvent_t> spare_ ABSL_GUARDED_BY(mutex_);
};

using CurrentStream = std::function<cudaStream_t()>;

class EventMark : public DeviceKernels::Mark {
 public:
  EventMark(std::shared_ptr<Events> events, CurrentStream compute, cudaStream_t stream)
      : events_(std::move(events)), compute_(std::move(compute)), event_(events_->take()) {
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  ~EventMark() override { events_->give_back(event_); }

  bool passed() override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // clears the error, so that the next launch does not report it
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }
  void wait() override { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  void join() override { hold_back(compute_()); }
  void hold_back(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_), "cudaStreamWaitEvent"); }

 private:
  const std::shared_ptr<Events> events_;
  const CurrentStream compute_;
  const cudaEvent_t event_;
};

/// A stream for copies, in addition to the streams that compute. It is made when it is first used, since the device is
/// known only then.
class CopyStream {
 public:
  ~CopyStream() {
    if (stream_) cudaStreamDestroy(stream_);
  }
  cudaStream_t get() {
    if (!stream_) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream_;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

class EventInterval : public DeviceKernels::Interval {
 public:
  EventInterval(std::shared_ptr<Events> events, cudaStream_t stream)
      : events_(std::move(events)), stream_(stream), begin_(events_->take()), end_(events_->take()) {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
  }
  ~EventInterval() override {
    events_->give_back(begin_);
    events_->give_back(end_);
  }

  void end() noexcept override { ended_ = cudaEventRecord(end_, stream_); }
  double seconds() override {
    check(ended_, "cudaEventRecord");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds / 1e3;
  }

 private:
  const std::shared_ptr<Events> events_;
  const cudaStream_t stream_;
  const cudaEvent_t begin_, end_;
  cudaError_t ended_ = cudaSuccess;
};

class CudaKernels : public DeviceKernels {
 public:
  explicit CudaKernels(CurrentStream current_stream) : stream_(std::move(current_stream)) {}

  void norm(const NormTables& tables) override { check(cuda::norm_sums(tables, stream_()), "norm_sums"); }
  void own_squares(const OwnPieces& pieces) override { check(cuda::own_squares(pieces, stream_()), "own_squares"); }
  void decide(const StepRequest& request, const StepTables& t) override {
    const cudaStream_t stream = stream_();
    check(cuda::read_messages(t, stream), "read_messages");
    check(cuda::norm_totals(t, stream), "norm_totals");
    check(cuda::decide_step(request, t, stream), "decide_step");
  }
  void begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables) override {
    check(cuda::begin_unit(request, unit, tables, stream_()), "begin_unit");
  }
  void update(const DeviceRun& run, const StepTables& tables) override {
    check(cuda::update_step(run, tables, stream_()), "update_step");
  }
  void muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants,
                       const StepTables& tables) override {
    check(cuda::muon_directions(run, constants, tables, stream_()), "muon_directions");
  }
  void adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables) override {
    check(cuda::adapt_rates(request, layers, tables, stream_()), "adapt_rates");
  }
  void read_weights(const DeviceRun& run, float* masters) override {
    check(cuda::read_weights(run, masters, stream_()), "read_weights");
  }
  void assign_weights(const DeviceRun& run, const StepTables& tables) override {
    check(cuda::assign_weights(run, tables, stream_()), "assign_weights");
  }
  void write_weights(const StepArguments& to, const float* masters) override {
    check(cuda::write_weights(to, masters, stream_()), "write_weights");
  }
  void outer_pass(const OuterRun& run) override { check(cuda::outer_pass(run, stream_()), "outer_pass"); }
  void adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor,
                 std::span<double> scratch) override {
    check(cuda::step_adafactor(config, numbers, tensor, scratch, stream_()), "step_adafactor");
  }
  void swap_averages(const DeviceRun& run, const StepTables& tables) override {
    check(cuda::swap_averages(run, tables, stream_()), "swap_averages");
  }

  std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) override {
    stream_();  // selects the stream's device
    std::shared_ptr<std::byte> memory = pinned(std::max<std::size_t>(bytes, 1));
    if (to_page(memory.get()) > 0) {
      memory = pinned(bytes + kPageBytes);
      memory = {memory, memory.get() + to_page(memory.get())};
    }
    std::memset(memory.get(), 0, bytes);
    return memory;
  }
  std::unique_ptr<Mark> upload(std::span<const UploadPiece> pieces, const Mark* after) override {
    const cudaStream_t up = up_after(after);
    for (const UploadPiece& piece : pieces) {
      check(cudaMemcpyAsync(piece.device, piece.pinned, piece.bytes, cudaMemcpyHostToDevice, up),
            "cudaMemcpyAsync to the device");
    }
    return mark_of(up);
  }
  std::unique_ptr<Mark> upload_encoded(void* device, const std::byte* pinned, const EncodedParts& parts,
                                       const Mark* after) override {
    const cudaStream_t up = up_after(after);
    check(cuda::decode_parts(parts, pinned, device, cuda::kCodecBlocksOverBus, up), "decode_parts");
    return mark_of(up);
  }
  std::unique_ptr<Mark> download(std::byte* pinned, const void* device, std::size_t bytes) override {
    const cudaStream_t down = down_after_compute();
    check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, down), "cudaMemcpyAsync from the device");
    return mark_of(down);
  }
  std::unique_ptr<Mark> download_encoded(std::byte* pinned, const void* device, const EncodedParts& parts,
                                         float* residual) override {
    const cudaStream_t down = down_after_compute();
    check(cuda::encode_parts(parts, device, residual, pinned, cuda::kCodecBlocksOverBus, down), "encode_parts");
    return mark_of(down);
  }
  std::unique_ptr<Mark> download_signs(std::byte* pinned, const float* device, const SignMessages& messages) override {
    const cudaStream_t down = down_after_compute();
    auto* const words = reinterpret_cast<std::uint32_t*>(pinned);
    check(cuda::encode_sign_messages(messages, device, words, cuda::kCodecBlocksOverBus, down), "encode_sign_messages");
    return mark_of(down);
  }
  void fetch(std::byte* pinned, const void* device, std::size_t bytes) override {
    const MutexLock lock(fetching_);
    stream_();  // selects the stream's device
    const cudaStream_t beside = beside_.get();
    check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, beside), "cudaMemcpyAsync from the device");
    check(cudaStreamSynchronize(beside), "cudaStreamSynchronize");
  }
  std::unique_ptr<Mark> mark() override { return mark_of(stream_()); }
  std::unique_ptr<Interval> begin_interval() override { return std::make_unique<EventInterval>(timed_, stream_()); }

 private:
  std::unique_ptr<EventMark> mark_of(cudaStream_t stream) {
    return std::make_unique<EventMark>(marks_, stream_, stream);
  }
  /// Returns the stream of copies to the device. Work that is queued there from now on waits for `after`, if it is
  /// given.
  cudaStream_t up_after(const Mark* after) {
    stream_();  // selects the stream's device
    const cudaStream_t up = up_.get();
    if (after) static_cast<const EventMark*>(after)->hold_back(up);
    return up;
  }
  /// Returns the stream of copies from the device. Work that is queued there from now on waits for all work that is on
  /// the current stream.
  cudaStream_t down_after_compute() {
    const std::unique_ptr<EventMark> computed = mark_of(stream_());
    const cudaStream_t down = down_.get();
    computed->hold_back(down);
    return down;
  }

  const CurrentStream stream_;
  const std::shared_ptr<Events> marks_ = std::make_shared<Events>(cudaEventDisableTiming);
  const std::shared_ptr<Events> timed_ = std::make_shared<Events>(cudaEventDefault);
  CopyStream up_, down_;
  Mutex fetching_;
  CopyStream beside_ ABSL_GUARDED_BY(fetching_);  ///< the stream of `fetch`
};

}  // namespace

std::unique_ptr<DeviceKernels> cuda_kernels(std::function<cudaStream_t()> current_stream) {
  return std::make_unique<CudaKernels>(std::move(current_stream));
}

}  // namespace tessera
