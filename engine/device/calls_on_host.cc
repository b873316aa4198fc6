#include "engine/device/calls_on_host.h"

#include <absl/status/status.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/sum_method.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {

// This file lets hosts make calls of their GPUs' groups.
//
// Each call takes a slot of pinned memory, one slot after the other. The contribution is copied down when the call is
// made. The hosts' call begins after that copy, and `wait` queues the copy of its result up to the GPU. A slot is used
// again when its last copy up is over. The Reducer begins sums (`advance`). Gathers begin in the order of their calls,
// whichever of them is waited for first (`GathersOnHost::begin`).
//
// In a lossy form, the GPU encodes the contribution to a sum, or this rank's part of a gather, on its way down, so that
// a slot has messages (EncodedParts). The hosts send these as they are. The GPU decodes gathered messages on their way
// up; sums are fp32. For a method that sends signs, the GPU makes the method's messages (SumOfMessages).

namespace {

using Mark = DeviceKernels::Mark;

/// A GPU's group, and a second group of the same ranks, which works in the memory of their hosts. All calls go to the
/// GPU's group; if one of the two groups ends, so does the other. SumsOnHost and GathersOnHost derive from it, and give
/// some calls to the hosts.
class GroupWithHost : public ForwardingCollectives {
 public:
  GroupWithHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host, DeviceKernels& kernels,
                const CallSlots& slots)
      : ForwardingCollectives(std::move(group)),
        host_(std::move(host)),
        kernels_(kernels),
        memory_(slots.memory),
        slot_bytes_(static_cast<std::size_t>(slots.slot_bytes)) {}

  void abort(const absl::Status& reason) override {
    group_->abort(reason);
    host_->abort(reason);
  }
  void leave() override {
    group_->leave();
    host_->leave();
  }
  absl::Status status() const override {
    const absl::Status of_group = group_->status();
    return of_group.ok() ? host_->status() : of_group;
  }
  bool end_if_left_alone(HasKey has_key) override {
    const bool ended_group = group_->end_if_left_alone(has_key);
    return host_->end_if_left_alone(has_key) || ended_group;
  }

 protected:
  const std::shared_ptr<Collectives> host_;
  DeviceKernels& kernels_;
  const std::shared_ptr<std::byte> memory_;
  const std::size_t slot_bytes_;
};

bool is_compressed(const ReduceOptions& options) {
  return options.method != nullptr || options.contributions != WireForm::kPlain || options.sums != WireForm::kPlain;
}

/// A call of the Reducer. Its input and output are on the GPU.
struct Sum {
  Sum(const ReduceCall& call, int ranks) : call(call), label(call.label) {
    const std::size_t parts = call.scatters ? static_cast<std::size_t>(ranks) : 1;
    SumMethod* const method = call.options.method;
    if (!method && is_lossy(call.options.contributions))
      encoded = EncodedParts{call.options.contributions, call.dtype, call.numel, parts};
    if (method && call.dtype == DType::kF32 && method->of_messages())
      signs = method->of_messages()->next_messages(call.input_numel(ranks));
    slot_bytes = encoded ? encoded->bytes() : call.input_numel(ranks) * size_of(call.dtype);
  }

  ReduceCall call;
  std::string label;                    ///< copy of the call's label, whose memory may be gone
  std::optional<EncodedParts> encoded;  ///< the messages of the input, if the GPU encodes it in a form
  std::optional<SignMessages> signs;    ///< the messages of the input, if the GPU encodes it for a method
  std::size_t slot_bytes;               ///< number of bytes of the contribution in a slot
};

class SumsOnHost final : public GroupWithHost {
 public:
  SumsOnHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host, DeviceKernels& kernels,
             const CallSlots& slots)
      : GroupWithHost(std::move(group), std::move(host), kernels, slots),
        slots_(static_cast<std::size_t>(slots.slots)) {}

  bool reduces_in_background() const override { return false; }
  int compressed_part() const override { return host_->compressed_part(); }

 protected:
  Work do_reduce(const ReduceCall& call) override {
    return is_compressed(call.options) ? start({call, size()}) : group_->reduce(call);
  }

 private:
  class Pending;
  /// A piece of pinned memory, and the copy that has brought its last sum to the GPU.
  struct Slot {
    std::unique_ptr<Mark> uploaded;
    bool is_taken = false;
  };

  Work start(Sum sum);

  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

class SumsOnHost::Pending final : public Work::State {
 public:
  Pending(SumsOnHost& owner, Sum sum, Slot& slot, std::byte* memory)
      : owner_(owner), sum_(std::move(sum)), slot_(slot), contribution_(memory) {
    // A contribution of fp32 elements is summed in place. Otherwise the sum lies behind the contribution, where a cache
    // line begins.
    constexpr std::size_t kCacheLine = 64;
    const bool is_in_place = sum_.call.dtype == DType::kF32 && !sum_.encoded;
    std::byte* const behind = memory + (sum_.slot_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    std::byte* const own = memory + (sum_.call.scatters ? sum_bytes() * rank() : 0);
    sums_ = reinterpret_cast<float*>(is_in_place ? own : behind);
    const auto* const end = reinterpret_cast<std::byte*>(sums_ + sum_.call.numel);
    TORCH_INTERNAL_ASSERT(end <= memory + owner_.slot_bytes_, "a sum is larger than its slot on the host");
    slot_.is_taken = true;
    downloaded_ = download();
  }
  ~Pending() override {
    work_ = Work();  // the transport may wait here, and writes into the slot until the wait ends
    slot_.is_taken = false;
  }

  absl::Status advance() override {
    if (std::exchange(is_begun_, true)) return absl::OkStatus();
    downloaded_->wait();
    const absl::Status there = owner_.group_->status();  // the GPU group's status: a failure is known only now, after
                                                         // the wait for the device
    work_ = there.ok() ? begin() : Work(there);
    return there;
  }
  absl::Status wait() override {
    TESSERA_RETURN_IF_ERROR(advance());
    TESSERA_RETURN_IF_ERROR(work_.wait());
    const DeviceKernels::UploadPiece piece{sum_.call.output, reinterpret_cast<const std::byte*>(sums_), sum_bytes()};
    slot_.uploaded = owner_.kernels_.upload({&piece, 1}, downloaded_.get());
    slot_.uploaded->join();
    return absl::OkStatus();
  }

 private:
  std::size_t rank() const { return static_cast<std::size_t>(owner_.rank()); }
  std::size_t sum_bytes() const { return sum_.call.numel * sizeof(float); }
  std::unique_ptr<Mark> download() {
    DeviceKernels& kernels = owner_.kernels_;
    const ReduceCall& call = sum_.call;
    if (sum_.encoded) return kernels.download_encoded(contribution_, call.input, *sum_.encoded, call.options.feedback);
    if (sum_.signs) return kernels.download_signs(contribution_, static_cast<const float*>(call.input), *sum_.signs);
    return kernels.download(contribution_, call.input, sum_.slot_bytes);
  }
  Work begin() {
    ReduceCall call = sum_.call;
    call.label = sum_.label;
    call.input = contribution_;
    call.output = sums_;
    call.options.waits = Waits::kLater;  // the sum runs on the transport's own thread, while this thread continues
    if (sum_.encoded || sum_.signs) {
      call.options.encoded = contribution_;
      call.options.feedback = nullptr;  // the GPU has already updated the feedback
    }
    return owner_.host_->reduce(call);
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
  if (absl::Status possible = check_device_sum(sum.label, sum.call.dtype, sum.call.options.visitor); !possible.ok())
    return Work(possible);
  const std::size_t turn = next_++ % slots_.size();
  Slot& slot = slots_[turn];
  TORCH_INTERNAL_ASSERT(!slot.is_taken, "more sums are under way than were planned");
  if (slot.uploaded) slot.uploaded->wait();
  return Work(std::make_unique<Pending>(*this, std::move(sum), slot, memory_.get() + turn * slot_bytes_));
}

class GathersOnHost final : public GroupWithHost {
 public:
  GathersOnHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host, DeviceKernels& kernels,
                const CallSlots& slots)
      : GroupWithHost(std::move(group), std::move(host), kernels, slots),
        slots_(static_cast<std::size_t>(slots.slots)) {}

 protected:
  Work do_all_gather(const GatherCall& call) override {
    const bool is_plain = call.options.form == WireForm::kPlain || call.bytes_per_rank == 0;
    return is_plain ? group_->all_gather(call) : start(call);
  }

 private:
  class Pending;
  /// A piece of pinned memory, the gather that uses it, and the copy that has brought its last values to the GPU.
  struct Slot {
    Pending* holder = nullptr;
    std::shared_ptr<Mark> uploaded;
  };

  Work start(const GatherCall& gather);
  /// Begins gathers over the hosts up to `last`, in their order; if `last` is null, all gathers whose part has reached
  /// the host.
  absl::Status begin(const Pending* last);

  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  std::deque<Pending*> waiting_;  ///< gathers that have not begun over the hosts, in their order
};

class GathersOnHost::Pending final : public Work::State {
 public:
  Pending(GathersOnHost& owner, const GatherCall& gather, Slot& slot, std::byte* memory)
      : owner_(owner), gather_(gather), label_(gather.label), slot_(slot), full_(memory) {
    const GatherOptions& options = gather_.options;
    if (ranks() > 1 && is_lossy(options.form) && is_reducible(options.dtype))
      part_ = {options.form, options.dtype, gather_.bytes_per_rank / size_of(options.dtype), 1};
    TORCH_INTERNAL_ASSERT(bytes() <= owner_.slot_bytes_, "a gather is larger than its slot on the host");
    DeviceKernels& kernels = owner_.kernels_;
    downloaded_ = is_encoded() ? kernels.download_encoded(own_part(), gather_.shard, part_, nullptr)
                               : kernels.download(own_part(), gather_.shard, gather_.bytes_per_rank);
    slot_.holder = this;
    owner_.waiting_.push_back(this);
  }
  ~Pending() override {
    std::erase(owner_.waiting_, this);
    work_ = Work();  // the transport may wait here, and writes into the slot until the wait ends
    if (slot_.holder == this) slot_.holder = nullptr;
  }

  bool is_on_host() { return downloaded_->passed(); }
  /// Begins the gather over the hosts. It is called in the order of the gathers.
  absl::Status begin() {
    downloaded_->wait();
    const absl::Status there = owner_.group_->status();  // the GPU group's status, which is known now, after the wait
                                                         // for the device
    if (there.ok()) {
      const GatherOptions options = is_encoded() ? GatherOptions() : gather_.options;
      work_ = owner_.host_->all_gather(label_, own_part(), full_, part_bytes(), options);
    } else {
      work_ = Work(there);
    }
    return there;
  }
  /// Waits for the gather on the host, and queues the copy of its values to the GPU.
  absl::Status finish() {
    if (uploaded_) return absl::OkStatus();
    if (std::ranges::find(owner_.waiting_, this) != owner_.waiting_.end()) TESSERA_RETURN_IF_ERROR(owner_.begin(this));
    TESSERA_RETURN_IF_ERROR(work_.wait());
    uploaded_ = upload();
    slot_.uploaded = uploaded_;
    slot_.holder = nullptr;
    return absl::OkStatus();
  }
  absl::Status wait() override {
    TESSERA_RETURN_IF_ERROR(finish());
    uploaded_->join();
    return absl::OkStatus();
  }

 private:
  bool is_encoded() const { return part_.part_numel > 0; }
  /// Returns the number of bytes of a rank's part on the host.
  std::size_t part_bytes() const { return is_encoded() ? part_.bytes() : gather_.bytes_per_rank; }
  std::size_t ranks() const { return static_cast<std::size_t>(owner_.size()); }
  std::size_t rank() const { return static_cast<std::size_t>(owner_.rank()); }
  std::size_t bytes() const { return part_bytes() * ranks(); }
  std::byte* own_part() const { return full_ + part_bytes() * rank(); }
  std::unique_ptr<Mark> upload() {
    if (!is_encoded()) return owner_.kernels_.upload(pieces(), downloaded_.get());
    EncodedParts all = part_;
    all.parts = ranks();
    return owner_.kernels_.upload_encoded(gather_.full, full_, all, downloaded_.get());
  }
  /// Returns the parts to copy up to the GPU: all parts, except this rank's own part if the GPU has it unchanged in its
  /// place. The GPU's own part may be newer than the host's, if an update came after a gather that was made ahead and
  /// not used.
  std::vector<DeviceKernels::UploadPiece> pieces() const {
    auto* const there = static_cast<std::byte*>(gather_.full);
    const std::size_t own = gather_.bytes_per_rank * rank(), behind = own + gather_.bytes_per_rank;
    if (gather_.shard != there + own) return {DeviceKernels::UploadPiece{there, full_, bytes()}};
    std::vector<DeviceKernels::UploadPiece> pieces;
    if (own > 0) pieces.push_back({there, full_, own});
    if (behind < bytes()) pieces.push_back({there + behind, full_ + behind, bytes() - behind});
    return pieces;
  }

  GathersOnHost& owner_;
  const GatherCall gather_;  ///< the call to make; its memory is on the GPU
  const std::string label_;  ///< copy of the call's label, whose memory may be gone
  Slot& slot_;
  EncodedParts part_;      ///< this rank's part, if GPUs encode the parts; otherwise it has no elements
  std::byte* const full_;  ///< where all parts lie on the host
  std::unique_ptr<Mark> downloaded_;
  std::shared_ptr<Mark> uploaded_;
  Work work_;  ///< the gather on the host
};

absl::Status GathersOnHost::begin(const Pending* last) {
  while (!waiting_.empty()) {
    Pending* const next = waiting_.front();
    if (!last && !next->is_on_host()) return absl::OkStatus();
    waiting_.pop_front();
    TESSERA_RETURN_IF_ERROR(next->begin());
    if (next == last) return absl::OkStatus();
  }
  return absl::OkStatus();
}

Work GathersOnHost::start(const GatherCall& gather) {
  if (absl::Status begun = begin(nullptr); !begun.ok()) return Work(begun);
  const std::size_t turn = next_++ % slots_.size();
  Slot& slot = slots_[turn];
  if (slot.holder) {
    if (absl::Status ended = slot.holder->finish(); !ended.ok()) return Work(ended);
  }
  if (slot.uploaded) std::exchange(slot.uploaded, nullptr)->wait();
  return Work(std::make_unique<Pending>(*this, gather, slot, memory_.get() + turn * slot_bytes_));
}

}  // namespace

std::shared_ptr<Collectives> sums_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                          DeviceKernels& kernels, const CallSlots& slots) {
  return std::make_shared<SumsOnHost>(std::move(group), std::move(host), kernels, slots);
}

std::shared_ptr<Collectives> gathers_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                             DeviceKernels& kernels, const CallSlots& slots) {
  return std::make_shared<GathersOnHost>(std::move(group), std::move(host), kernels, slots);
}

}  // namespace tessera
