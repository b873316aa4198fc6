// The kernels of the emulated GPU. They are those of optim/cuda, compiled for the host, behind the interface through
// which the engine launches kernels (DeviceKernels). They check that their memory belongs to the device.

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "optim/cuda/device_adafactor.h"
#include "optim/cuda/device_codec.h"
#include "optim/cuda/device_layers.h"
#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_outer.h"
#include "optim/cuda/device_signs.h"
#include "optim/cuda/device_step.h"

namespace tessera::testing {
namespace {

std::mutex gpu;  // one mutex for all ranks, since a launch uses the memory of thread blocks exclusively

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error("emulated kernel: error " + std::to_string(error));
}

/// The pinned memory of all ranks.
class PinnedMemory {
 public:
  std::shared_ptr<std::byte> take(std::size_t bytes) {
    auto* const begin = static_cast<std::byte*>(::operator new(bytes + 1, kPage));
    std::memset(begin, 0, bytes);
    const std::lock_guard lock(mutex_);
    ends_[begin] = begin + bytes;
    return {begin, [this](std::byte* memory) {
              {
                const std::lock_guard lock(mutex_);
                ends_.erase(memory);
              }
              ::operator delete(memory, kPage);
            }};
  }
  bool holds(const void* memory) {
    const auto* const at = static_cast<const std::byte*>(memory);
    const std::lock_guard lock(mutex_);
    const auto behind = ends_.upper_bound(at);
    return behind != ends_.begin() && at < std::prev(behind)->second;
  }

 private:
  static constexpr std::align_val_t kPage{4096};
  std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_;
};

PinnedMemory& pinned() {
  static PinnedMemory memory;
  return memory;
}

void expect_pinned(const void* host, bool is_wanted, const char* what) {
  if (host != nullptr && pinned().holds(host) != is_wanted) {
    throw std::runtime_error(std::string("emulated device: ") + what +
                             (is_wanted ? " is not pinned memory of the host" : " is memory of the host"));
  }
}

/// Checks that a kernel's memory belongs to the device. Kernels reach pinned memory only at the speed of the bus. Only
/// parameters, which may be the masters, may therefore lie there.
void expect_on_device(const DeviceRun& run) {
  const StepArguments& a = run.arguments;
  if (a.numel == 0) return;
  const bool are_masters = a.parameter == nullptr && a.low == nullptr;
  for (const void* memory :
       {static_cast<const void*>(a.gradient), static_cast<const void*>(are_masters ? nullptr : a.master),
        static_cast<const void*>(a.low), static_cast<const void*>(a.average.values)}) {
    expect_pinned(memory, false, "what is updated");
  }
  for (const StateArgument& state : a.states) expect_pinned(state.data, false, "what is updated");
}

class EmulatedKernels : public DeviceKernels {
 public:
  explicit EmulatedKernels(CopiesRead read) : read_(read) {}

  void norm(const NormTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::norm_sums(tables, nullptr));
  }
  void own_squares(const OwnPieces& pieces) override {
    for (std::uint32_t i = 0; i < pieces.count; ++i)
      expect_pinned(pieces.pieces[i].values, false, "a gradient that is squared");
    const std::lock_guard lock(gpu);
    check(cuda::own_squares(pieces, nullptr));
  }
  void decide(const StepRequest& request, const StepTables& t) override {
    const std::lock_guard lock(gpu);
    check(cuda::read_messages(t, nullptr));
    check(cuda::norm_totals(t, nullptr));
    check(cuda::decide_step(request, t, nullptr));
  }
  void begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::begin_unit(request, unit, tables, nullptr));
  }
  void update(const DeviceRun& run, const StepTables& tables) override {
    expect_on_device(run);
    if (run.direction) expect_pinned(run.direction, false, "where directions go");
    const std::lock_guard lock(gpu);
    check(cuda::update_step(run, tables, nullptr));
  }
  void muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants,
                       const StepTables& tables) override {
    expect_on_device(run);
    const std::lock_guard lock(gpu);
    check(cuda::muon_directions(run, constants, tables, nullptr));
  }
  void adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables) override {
    const std::lock_guard lock(gpu);
    check(cuda::adapt_rates(request, layers, tables, nullptr));
  }
  void read_weights(const DeviceRun& run, float* masters) override {
    expect_on_device(run);
    expect_pinned(masters, false, "a copy of weights");
    const std::lock_guard lock(gpu);
    check(cuda::read_weights(run, masters, nullptr));
  }
  void assign_weights(const DeviceRun& run, const StepTables& tables) override {
    expect_on_device(run);
    const std::lock_guard lock(gpu);
    check(cuda::assign_weights(run, tables, nullptr));
  }
  void write_weights(const StepArguments& to, const float* masters) override {
    for (const void* memory : {static_cast<const void*>(to.master), static_cast<const void*>(to.low),
                               static_cast<const void*>(to.parameter), static_cast<const void*>(masters)}) {
      expect_pinned(memory, false, "what is written, or the masters for it,");
    }
    const std::lock_guard lock(gpu);
    check(cuda::write_weights(to, masters, nullptr));
  }
  void outer_pass(const OuterRun& run) override {
    for (const float* memory : {static_cast<const float*>(run.values), run.own, static_cast<const float*>(run.weights),
                                static_cast<const float*>(run.momentum)}) {
      expect_pinned(memory, false, "what an outer step reads or writes");
    }
    const std::lock_guard lock(gpu);
    check(cuda::outer_pass(run, nullptr));
  }
  void adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor,
                 std::span<double> scratch) override {
    for (const std::span<float> memory :
         {tensor.parameter, tensor.gradient, tensor.row_var, tensor.col_var, tensor.variance}) {
      if (!memory.empty()) expect_pinned(memory.data(), false, "what is updated");
    }
    if (!scratch.empty()) expect_pinned(scratch.data(), false, "scratch memory");
    const std::lock_guard lock(gpu);
    check(cuda::step_adafactor(config, numbers, tensor, scratch, nullptr));
  }
  void swap_averages(const DeviceRun& run, const StepTables& tables) override {
    expect_on_device(run);
    const std::lock_guard lock(gpu);
    check(cuda::swap_averages(run, tables, nullptr));
  }

  std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) override { return pinned().take(bytes); }
  /// A mark that passes as late as possible: only when this thread waits for it. Marks of copies inherit from it.
  struct LateMark : Mark {
    bool passed() override { return done; }
    void wait() override { done = true; }
    void join() override {}
    bool done = false;
  };
  /// A copy to the host. Later computation is ordered after it. Its bytes reach the host's memory when the host waits.
  struct Arrival {
    using Copy = std::function<void(std::byte*)>;
    /// `copy` reads the device's memory, and writes `bytes` bytes.
    Arrival(std::byte* host, std::size_t bytes, Copy copy) : to(host), from(std::move(copy)), arrived(bytes) {}
    void read() {
      if (!std::exchange(is_read, true)) from(arrived.data());
    }
    void arrive() {
      if (!std::exchange(is_done, true)) std::memcpy(to, arrived.data(), arrived.size());
    }
    bool is_read_by(const UploadPiece& piece) const {
      return is_read && to < piece.pinned + piece.bytes && piece.pinned < to + arrived.size();
    }
    std::byte* const to;
    const Copy from;
    std::vector<std::byte> arrived;
    bool is_read = false, is_done = false;
  };
  struct LateUpload : LateMark {
    LateUpload(std::function<void()> made, std::vector<std::shared_ptr<Arrival>> behind)
        : copy(std::move(made)), before(std::move(behind)) {}
    ~LateUpload() override { join(); }  // the copy happens even if nobody waits for it
    void join() override {
      for (const auto& arrival : before) {
        arrival->read();
        arrival->arrive();
      }
      before.clear();
      if (!std::exchange(done, true)) copy();
    }
    void wait() override { join(); }
    const std::function<void()> copy;
    std::vector<std::shared_ptr<Arrival>> before;
  };
  using Arrivals = std::vector<std::shared_ptr<Arrival>>;
  /// A copy to the host. Such copies are made one after the other, in the order in which they were queued.
  struct LateDownload : LateMark {
    LateDownload(std::shared_ptr<Arrival> copy, const std::vector<std::weak_ptr<Arrival>>& queued)
        : arrival(std::move(copy)), before(queued) {}
    bool passed() override { return arrival->is_done; }
    void join() override {
      for (const auto& each : up_to_this()) each->read();
    }
    void wait() override {
      for (const auto& each : up_to_this()) {
        each->read();
        each->arrive();
      }
    }
    Arrivals up_to_this() const {
      Arrivals alive;
      for (const auto& each : before) {
        if (auto earlier = each.lock()) alive.push_back(std::move(earlier));
      }
      alive.push_back(arrival);
      return alive;
    }
    const std::shared_ptr<Arrival> arrival;
    const std::vector<std::weak_ptr<Arrival>> before;
  };
  std::unique_ptr<Mark> mark() override { return std::make_unique<LateMark>(); }
  std::unique_ptr<Mark> upload(std::span<const UploadPiece> given, const Mark* after) override {
    const std::vector<UploadPiece> pieces(given.begin(), given.end());
    for (const UploadPiece& piece : pieces) {
      expect_pinned(piece.pinned, true, "what is copied to the device");
      expect_pinned(piece.device, false, "where it is copied to");
    }
    return upload_behind(after, pieces, [pieces] {
      for (const UploadPiece& piece : pieces) std::memcpy(piece.device, piece.pinned, piece.bytes);
    });
  }
  std::unique_ptr<Mark> upload_encoded(void* device, const std::byte* from, const EncodedParts& parts,
                                       const Mark* after) override {
    expect_pinned(from, true, "what is decoded on its way to the device");
    expect_pinned(device, false, "where it is decoded to");
    const std::vector<UploadPiece> pieces = {{device, from, parts.bytes()}};
    return upload_behind(after, pieces, [parts, device, from] {
      const std::lock_guard lock(gpu);
      check(cuda::decode_parts(parts, from, device, cuda::kCodecBlocksOverBus, nullptr));
    });
  }
  std::unique_ptr<Mark> upload_behind(const Mark* after, const std::vector<UploadPiece>& pieces,
                                      std::function<void()> copy) const {
    auto mark = std::make_unique<LateUpload>(std::move(copy), before(after, pieces));
    if (read_ == CopiesRead::kAtOnce) mark->join();
    return mark;
  }
  /// Returns the copies to the host that come before a copy of `pieces` to the device, which waits for `after`.
  Arrivals before(const Mark* after, const std::vector<UploadPiece>& pieces) const {
    if (const auto* const download = dynamic_cast<const LateDownload*>(after)) return download->up_to_this();
    // A mark of the current stream comes after the copies that were joined to that stream.
    Arrivals earlier;
    for (const auto& weak : after ? downloads : std::vector<std::weak_ptr<Arrival>>()) {
      const auto arrival = weak.lock();
      const auto reads = [&](const UploadPiece& piece) { return arrival->is_read_by(piece); };
      if (arrival && std::ranges::any_of(pieces, reads)) earlier.push_back(arrival);
    }
    return earlier;
  }
  std::unique_ptr<Mark> download(std::byte* to, const void* device, std::size_t bytes) override {
    expect_pinned(to, true, "where it is copied to");
    expect_pinned(device, false, "what is copied from the device");
    return download_by({to, bytes, [device, bytes](std::byte* arrived) { std::memcpy(arrived, device, bytes); }});
  }
  std::unique_ptr<Mark> download_encoded(std::byte* to, const void* device, const EncodedParts& parts,
                                         float* residual) override {
    expect_pinned(to, true, "where it is encoded to");
    expect_pinned(device, false, "what is encoded on its way to the host");
    expect_pinned(residual, true, "what is kept of gradients");
    return download_by({to, parts.bytes(), [parts, device, residual](std::byte* arrived) {
                          const std::lock_guard lock(gpu);
                          check(
                              cuda::encode_parts(parts, device, residual, arrived, cuda::kCodecBlocksOverBus, nullptr));
                        }});
  }
  std::unique_ptr<Mark> download_signs(std::byte* to, const float* device, const SignMessages& messages) override {
    expect_pinned(to, true, "where signs are written to");
    expect_pinned(device, false, "what is sent as signs");
    expect_pinned(messages.kept, true, "what is kept of gradients");
    return download_by({to, messages.bytes(), [messages, device](std::byte* arrived) {
                          auto* const words = reinterpret_cast<std::uint32_t*>(arrived);
                          const std::lock_guard lock(gpu);
                          check(
                              cuda::encode_sign_messages(messages, device, words, cuda::kCodecBlocksOverBus, nullptr));
                        }});
  }
  std::unique_ptr<Mark> download_by(Arrival made) {
    std::erase_if(downloads, [](const std::weak_ptr<Arrival>& each) {
      const auto arrival = each.lock();
      return !arrival || arrival->is_done;
    });
    const auto arrival = std::make_shared<Arrival>(std::move(made));
    auto mark = std::make_unique<LateDownload>(arrival, downloads);
    if (read_ == CopiesRead::kAtOnce) mark->join();
    downloads.push_back(arrival);
    return mark;
  }
  void fetch(std::byte* to, const void* device, std::size_t bytes) override {
    expect_pinned(to, true, "where it is copied to");
    expect_pinned(device, false, "what is copied from the device");
    std::memcpy(to, device, bytes);
  }
  std::vector<std::weak_ptr<Arrival>> downloads;
  const CopiesRead read_;

  /// An interval that takes one second on this device.
  struct Second : Interval {
    void end() noexcept override { ended = true; }
    double seconds() override { return ended ? 1.0 : -1e9; }
    bool ended = false;
  };
  std::unique_ptr<Interval> begin_interval() override { return std::make_unique<Second>(); }
};

}  // namespace

bool is_pinned_memory(const void* memory) { return pinned().holds(memory); }

std::unique_ptr<DeviceKernels> emulated_kernels(CopiesRead read) { return std::make_unique<EmulatedKernels>(read); }

}  // namespace tessera::testing
