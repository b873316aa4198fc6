#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "tests/support/cuda_on_host.h"
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
  void norm(const NormTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::norm_sums(tables, nullptr));
  }
  void decide(const StepRequest& request, const StepTables& t) override {
    const std::lock_guard lock(gpu);
    check(cuda::read_messages(t, nullptr));
    check(cuda::norm_totals(t, nullptr));
    check(cuda::decide_step(request, t, nullptr));
  }
  void update(const DeviceRun& run, const StepTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::update_step(run, tables, nullptr));
  }
  void swap_averages(const DeviceRun& run, const StepTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::swap_averages(run, tables, nullptr));
  }

  std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) override {
    return {new std::byte[bytes + 1](), std::default_delete<std::byte[]>()};
  }
  /// Copies happen as late as they may: when computing, or this thread, is to come after them.
  struct LateMark : Mark {
    bool passed() override { return done; }
    void wait() override { done = true; }
    void join() override {}
    bool done = false;
  };
  struct LateUpload : LateMark {
    explicit LateUpload(std::span<const UploadPiece> all) : pieces(all.begin(), all.end()) {}
    void join() override {
      for (const UploadPiece& piece : pieces) std::memcpy(piece.device, piece.pinned, piece.bytes);
      pieces.clear();
      done = true;
    }
    void wait() override { join(); }
    std::vector<UploadPiece> pieces;
  };
  struct LateDownload : LateMark {
    LateDownload(std::byte* pinned, const void* device, std::size_t bytes) : to(pinned), from(device), arrived(bytes) {}
    void join() override {
      if (!std::exchange(is_read, true)) std::memcpy(arrived.data(), from, arrived.size());
    }
    void wait() override {
      join();
      if (!std::exchange(done, true)) std::memcpy(to, arrived.data(), arrived.size());
    }
    std::byte* const to;
    const void* const from;
    std::vector<std::byte> arrived;
    bool is_read = false;
  };
  std::unique_ptr<Mark> mark() override { return std::make_unique<LateMark>(); }
  std::unique_ptr<Mark> upload(std::span<const UploadPiece> pieces, const Mark*) override {
    return std::make_unique<LateUpload>(pieces);
  }
  std::unique_ptr<Mark> download(std::byte* pinned, const void* device, std::size_t bytes) override {
    return std::make_unique<LateDownload>(pinned, device, bytes);
  }

  /// A device on which every stretch takes a second.
  struct Second : Interval {
    void end() noexcept override { ended = true; }
    double seconds() override { return ended ? 1.0 : -1e9; }
    bool ended = false;
  };
  std::unique_ptr<Interval> begin_interval() override { return std::make_unique<Second>(); }
};

}  // namespace

std::unique_ptr<DeviceKernels> emulated_kernels() { return std::make_unique<EmulatedKernels>(); }

}  // namespace tessera::testing
