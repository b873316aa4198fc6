#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "tests/optim/cuda_on_host.h"
// Behind it: the kernels' source.
#include "optim/cuda/device_norm.cu"
#include "optim/cuda/device_step.cu"

namespace tessera::testing {
namespace {

std::mutex gpu;  // one for all ranks: a launch has the host's memory for its thread blocks to itself

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error("emulated kernel: error " + std::to_string(error));
}

class EmulatedKernels : public DeviceKernels {
 public:
  std::size_t norm_scratch_bytes(std::uint64_t numel) const override { return cuda::norm_scratch_bytes(numel); }
  void norm_nodes(const float* shard, std::uint64_t numel, std::uint64_t first_block, NormNode* nodes,
                  std::size_t max_nodes, void* scratch) override {
    const std::lock_guard lock(gpu);
    check(cuda::norm_nodes(shard, numel, first_block, nodes, max_nodes, scratch, nullptr));
  }
  void decide(const StepRequest& request, const StepTables& t) override {
    const std::lock_guard lock(gpu);
    check(cuda::read_messages(t, nullptr));
    check(cuda::combine_norm(t.nodes, t.first_node, t.group_blocks, t.groups, t.node_scratch, t.group_sums,
                             t.sum_of_squares, nullptr));
    check(cuda::decide_step(request, t, nullptr));
  }
  void update(const DeviceRun& run, const StepTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::update_step(run, tables, nullptr));
  }

  std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) override {
    return {new std::byte[bytes + 1](), std::default_delete<std::byte[]>()};
  }
  void upload(void* device, const std::byte* pinned, std::size_t bytes) override { std::memcpy(device, pinned, bytes); }
  void download(std::byte* pinned, const void* device, std::size_t bytes) override {
    const auto* from = static_cast<const std::byte*>(device);
    coming_.push_back({pinned, std::vector<std::byte>(from, from + bytes)});
  }

  /// What was on its way to the host when the mark was made arrives when somebody waits for it.
  class LateMark : public Mark {
   public:
    struct Delivery {
      std::byte* to;
      std::vector<std::byte> bytes;
    };
    explicit LateMark(std::vector<Delivery> deliveries) : deliveries_(std::move(deliveries)) {}
    bool passed() override { return deliveries_.empty(); }
    void wait() override {
      for (const Delivery& delivery : deliveries_) std::memcpy(delivery.to, delivery.bytes.data(), delivery.bytes.size());
      deliveries_.clear();
    }

   private:
    std::vector<Delivery> deliveries_;
  };
  /// A device on which every stretch takes a second.
  struct Second : Interval {
    void end() noexcept override { ended = true; }
    double seconds() override { return ended ? 1.0 : -1e9; }
    bool ended = false;
  };
  std::unique_ptr<Interval> begin_interval() override { return std::make_unique<Second>(); }

  std::unique_ptr<Mark> mark() override { return std::make_unique<LateMark>(std::exchange(coming_, {})); }

 private:
  std::vector<LateMark::Delivery> coming_;
};

}  // namespace

std::unique_ptr<DeviceKernels> emulated_kernels() { return std::make_unique<EmulatedKernels>(); }

}  // namespace tessera::testing
