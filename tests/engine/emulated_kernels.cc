#include <algorithm>
#include <cstring>
#include <memory>
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
  /// A copy to the host, once what is computed comes after it. Until the host waits, its bytes are nowhere that it looks.
  struct Arrival {
    Arrival(std::byte* pinned, const void* device, std::size_t bytes) : to(pinned), from(device), arrived(bytes) {}
    void read() {
      if (!std::exchange(is_read, true)) std::memcpy(arrived.data(), from, arrived.size());
    }
    void arrive() {
      if (!std::exchange(is_done, true)) std::memcpy(to, arrived.data(), arrived.size());
    }
    bool is_read_by(const UploadPiece& piece) const {
      return is_read && to < piece.pinned + piece.bytes && piece.pinned < to + arrived.size();
    }
    std::byte* const to;
    const void* const from;
    std::vector<std::byte> arrived;
    bool is_read = false, is_done = false;
  };
  struct LateUpload : LateMark {
    LateUpload(std::span<const UploadPiece> all, std::vector<std::shared_ptr<Arrival>> behind)
        : pieces(all.begin(), all.end()), before(std::move(behind)) {}
    void join() override {
      for (const auto& arrival : before) arrival->arrive();
      for (const UploadPiece& piece : pieces) std::memcpy(piece.device, piece.pinned, piece.bytes);
      before.clear();
      pieces.clear();
      done = true;
    }
    void wait() override { join(); }
    std::vector<UploadPiece> pieces;
    std::vector<std::shared_ptr<Arrival>> before;
  };
  struct LateDownload : LateMark {
    explicit LateDownload(std::shared_ptr<Arrival> copy) : arrival(std::move(copy)) {}
    bool passed() override { return arrival->is_done; }
    void join() override { arrival->read(); }
    void wait() override {
      arrival->read();
      arrival->arrive();
    }
    const std::shared_ptr<Arrival> arrival;
  };
  std::unique_ptr<Mark> mark() override { return std::make_unique<LateMark>(); }
  std::unique_ptr<Mark> upload(std::span<const UploadPiece> pieces, const Mark* after) override {
    // Behind a mark of the current stream come the copies that were joined to it.
    std::vector<std::shared_ptr<Arrival>> before;
    for (const auto& weak : after ? downloads : std::vector<std::weak_ptr<Arrival>>()) {
      const auto arrival = weak.lock();
      const auto reads = [&](const UploadPiece& piece) { return arrival->is_read_by(piece); };
      if (arrival && std::ranges::any_of(pieces, reads)) before.push_back(arrival);
    }
    return std::make_unique<LateUpload>(pieces, std::move(before));
  }
  std::unique_ptr<Mark> download(std::byte* pinned, const void* device, std::size_t bytes) override {
    std::erase_if(downloads, [](const std::weak_ptr<Arrival>& each) { return each.expired(); });
    const auto arrival = std::make_shared<Arrival>(pinned, device, bytes);
    downloads.push_back(arrival);
    return std::make_unique<LateDownload>(arrival);
  }
  std::vector<std::weak_ptr<Arrival>> downloads;

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
