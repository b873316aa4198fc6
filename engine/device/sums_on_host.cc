#include "engine/device/sums_on_host.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/device/group_with_host.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

using Mark = DeviceKernels::Mark;

bool is_compressed(const ReduceOptions& options) {
  return options.method != nullptr || options.contributions != WireForm::kPlain || options.sums != WireForm::kPlain;
}

/// A call of the Reducer, with its arguments.
struct Sum {
  std::string label;
  bool scatters = false;
  const void* input = nullptr;  ///< [numel] of `dtype`, on the GPU, like `output`
  DType dtype = DType::kF32;
  float* output = nullptr;
  std::size_t numel = 0;      ///< elements of the contribution
  std::size_t sum_numel = 0;  ///< elements of the output
  ReduceOptions options;

  std::size_t input_bytes() const { return numel * size_of(dtype); }
};

class SumsOnHost final : public GroupWithHost {
 public:
  SumsOnHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host, DeviceKernels& kernels,
             const HostSlots& slots)
      : GroupWithHost(std::move(group), std::move(host)),
        kernels_(kernels),
        memory_(slots.memory),
        slot_bytes_(static_cast<std::size_t>(slots.slot_bytes)),
        slots_(static_cast<std::size_t>(slots.slots)) {}

  bool reduces_in_background() const override { return false; }
  int compressed_part() const override { return host_->compressed_part(); }

 protected:
  Work do_reduce_scatter(std::string_view label, void* input, DType dtype, float* output, std::size_t numel_per_rank,
                         const ReduceOptions& options) override {
    if (!is_compressed(options)) return group_->reduce_scatter(label, input, dtype, output, numel_per_rank, options);
    const std::size_t numel = numel_per_rank * static_cast<std::size_t>(size());
    return start({std::string(label), true, input, dtype, output, numel, numel_per_rank, options});
  }
  Work do_all_reduce(std::string_view label, void* input, DType dtype, float* output, std::size_t numel,
                     const ReduceOptions& options) override {
    if (!is_compressed(options)) return group_->all_reduce(label, input, dtype, output, numel, options);
    return start({std::string(label), false, input, dtype, output, numel, numel, options});
  }

 private:
  class Pending;
  /// A piece of pinned memory, and the copy that has brought its last sum to the GPU.
  struct Slot {
    std::unique_ptr<Mark> uploaded;
    bool is_taken = false;
  };

  Work start(Sum sum);

  DeviceKernels& kernels_;
  const std::shared_ptr<std::byte> memory_;
  const std::size_t slot_bytes_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

class SumsOnHost::Pending final : public Work::State {
 public:
  Pending(SumsOnHost& owner, Sum sum, Slot& slot, std::byte* memory)
      : owner_(owner), sum_(std::move(sum)), slot_(slot), contribution_(memory) {
    // fp32 is summed in place; else the sum lies behind the contribution, where a cache line begins.
    constexpr std::size_t kCacheLine = 64;
    const bool is_wide = sum_.dtype == DType::kF32;
    std::byte* const behind = memory + (sum_.input_bytes() + kCacheLine - 1) / kCacheLine * kCacheLine;
    std::byte* const own = memory + (sum_.scatters ? sum_.sum_numel * sizeof(float) * rank() : 0);
    sums_ = reinterpret_cast<float*>(is_wide ? own : behind);
    const auto* const end = reinterpret_cast<std::byte*>(sums_ + sum_.sum_numel);
    TORCH_INTERNAL_ASSERT(end <= memory + owner_.slot_bytes_, "a sum is larger than its slot on the host");
    slot_.is_taken = true;
    downloaded_ = owner_.kernels_.download(contribution_, sum_.input, sum_.input_bytes());
  }
  ~Pending() override {
    work_ = Work();  // the transport may wait here, and writes into the slot until the wait ends
    slot_.is_taken = false;
  }

  absl::Status advance() override {
    if (std::exchange(is_begun_, true)) return absl::OkStatus();
    downloaded_->wait();
    const absl::Status there = owner_.group_->status();  // a failure is known now, after the wait for the device
    work_ = there.ok() ? begin() : Work(there);
    return there;
  }
  absl::Status wait() override {
    TESSERA_RETURN_IF_ERROR(advance());
    TESSERA_RETURN_IF_ERROR(work_.wait());
    const DeviceKernels::UploadPiece piece{sum_.output, reinterpret_cast<const std::byte*>(sums_),
                                           sum_.sum_numel * sizeof(float)};
    slot_.uploaded = owner_.kernels_.upload({&piece, 1}, downloaded_.get());
    slot_.uploaded->join();
    return absl::OkStatus();
  }

 private:
  std::size_t rank() const { return static_cast<std::size_t>(owner_.rank()); }
  Work begin() {
    Collectives& host = *owner_.host_;
    sum_.options.waits = Waits::kLater;  // the sum runs on the transport's own thread, while this one goes on
    return sum_.scatters
               ? host.reduce_scatter(sum_.label, contribution_, sum_.dtype, sums_, sum_.sum_numel, sum_.options)
               : host.all_reduce(sum_.label, contribution_, sum_.dtype, sums_, sum_.numel, sum_.options);
  }

  SumsOnHost& owner_;
  Sum sum_;
  Slot& slot_;
  std::byte* const contribution_;
  float* sums_ = nullptr;
  std::unique_ptr<Mark> downloaded_;
  bool is_begun_ = false;
  Work work_;  ///< the sum on the host
};

Work SumsOnHost::start(Sum sum) {
  if (absl::Status possible = check_device_sum(sum.label, sum.dtype, sum.options.visitor); !possible.ok())
    return Work(possible);
  const std::size_t turn = next_++ % slots_.size();
  Slot& slot = slots_[turn];
  TORCH_INTERNAL_ASSERT(!slot.is_taken, "more sums are under way than were planned");
  if (slot.uploaded) slot.uploaded->wait();
  return Work(std::make_unique<Pending>(*this, std::move(sum), slot, memory_.get() + turn * slot_bytes_));
}

}  // namespace

std::shared_ptr<Collectives> sums_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                          DeviceKernels& kernels, const HostSlots& slots) {
  return std::make_shared<SumsOnHost>(std::move(group), std::move(host), kernels, slots);
}

}  // namespace tessera
