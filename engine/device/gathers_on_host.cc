#include "engine/device/gathers_on_host.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "engine/device/group_with_host.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

using Mark = DeviceKernels::Mark;

/// A call, with its arguments.
struct Gather {
  std::string label;
  const void* shard = nullptr;  ///< on the GPU, like `full`
  void* full = nullptr;
  std::size_t bytes_per_rank = 0;
  GatherOptions options;
};

class GathersOnHost final : public GroupWithHost {
 public:
  GathersOnHost(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host, DeviceKernels& kernels,
                const HostSlots& slots)
      : GroupWithHost(std::move(group), std::move(host)),
        kernels_(kernels),
        memory_(slots.memory),
        slot_bytes_(static_cast<std::size_t>(slots.slot_bytes)),
        slots_(static_cast<std::size_t>(slots.slots)) {}

 protected:
  Work do_all_gather(std::string_view label, const void* shard, void* full, std::size_t bytes_per_rank,
                     const GatherOptions& options) override {
    if (options.form == WireForm::kPlain || bytes_per_rank == 0)
      return group_->all_gather(label, shard, full, bytes_per_rank, options);
    return start({std::string(label), shard, full, bytes_per_rank, options});
  }

 private:
  class Pending;
  /// A piece of pinned memory, the gather that has it, and the copy that has brought its last values to the GPU.
  struct Slot {
    Pending* holder = nullptr;
    std::shared_ptr<Mark> uploaded;
  };

  Work start(Gather gather);
  /// Begins gathers over the hosts up to `last`, in their order; with null, those whose part is on the host.
  absl::Status begin(const Pending* last);

  DeviceKernels& kernels_;
  const std::shared_ptr<std::byte> memory_;
  const std::size_t slot_bytes_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  std::deque<Pending*> waiting_;  ///< gathers that have not begun over the hosts, in their order
};

class GathersOnHost::Pending final : public Work::State {
 public:
  Pending(GathersOnHost& owner, Gather gather, Slot& slot, std::byte* memory)
      : owner_(owner), gather_(std::move(gather)), slot_(slot), full_(memory) {
    TORCH_INTERNAL_ASSERT(bytes() <= owner_.slot_bytes_, "a gather is larger than its slot on the host");
    downloaded_ = owner_.kernels_.download(own_part(), gather_.shard, gather_.bytes_per_rank);
    slot_.holder = this;
    owner_.waiting_.push_back(this);
  }
  ~Pending() override {
    std::erase(owner_.waiting_, this);
    work_ = Work();  // the transport may wait here, and writes into the slot until the wait ends
    if (slot_.holder == this) slot_.holder = nullptr;
  }

  bool is_on_host() { return downloaded_->passed(); }
  /// Begins the gather over the hosts, when its turn has come.
  absl::Status begin() {
    downloaded_->wait();
    const absl::Status there = owner_.group_->status();  // known now, after the wait for the device
    if (there.ok()) {
      work_ = owner_.host_->all_gather(gather_.label, own_part(), full_, gather_.bytes_per_rank, gather_.options);
    } else {
      work_ = Work(there);
    }
    return there;
  }
  /// Ends the gather, and queues the copy of its values to the GPU.
  absl::Status finish() {
    if (uploaded_) return absl::OkStatus();
    if (std::ranges::find(owner_.waiting_, this) != owner_.waiting_.end()) TESSERA_RETURN_IF_ERROR(owner_.begin(this));
    TESSERA_RETURN_IF_ERROR(work_.wait());
    uploaded_ = owner_.kernels_.upload(pieces(), downloaded_.get());
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
  std::size_t bytes() const { return gather_.bytes_per_rank * static_cast<std::size_t>(owner_.size()); }
  std::size_t own_offset() const { return gather_.bytes_per_rank * static_cast<std::size_t>(owner_.rank()); }
  std::byte* own_part() const { return full_ + own_offset(); }
  /// Returns what goes up: all parts, except this rank's own if it is unchanged in its place. An update may have
  /// changed it meanwhile, if nobody used what was gathered ahead.
  std::vector<DeviceKernels::UploadPiece> pieces() const {
    auto* const there = static_cast<std::byte*>(gather_.full);
    const bool has_own = gather_.shard == there + own_offset() && !is_lossy(gather_.options.form);
    if (!has_own) return {DeviceKernels::UploadPiece{there, full_, bytes()}};
    const std::size_t behind = own_offset() + gather_.bytes_per_rank;
    std::vector<DeviceKernels::UploadPiece> pieces;
    if (own_offset() > 0) pieces.push_back({there, full_, own_offset()});
    if (behind < bytes()) pieces.push_back({there + behind, full_ + behind, bytes() - behind});
    return pieces;
  }

  GathersOnHost& owner_;
  const Gather gather_;
  Slot& slot_;
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

Work GathersOnHost::start(Gather gather) {
  if (absl::Status begun = begin(nullptr); !begun.ok()) return Work(begun);
  const std::size_t turn = next_++ % slots_.size();
  Slot& slot = slots_[turn];
  if (slot.holder) {
    if (absl::Status ended = slot.holder->finish(); !ended.ok()) return Work(ended);
  }
  if (slot.uploaded) std::exchange(slot.uploaded, nullptr)->wait();
  return Work(std::make_unique<Pending>(*this, std::move(gather), slot, memory_.get() + turn * slot_bytes_));
}

}  // namespace

std::shared_ptr<Collectives> gathers_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                             DeviceKernels& kernels, const HostSlots& slots) {
  return std::make_shared<GathersOnHost>(std::move(group), std::move(host), kernels, slots);
}

}  // namespace tessera
