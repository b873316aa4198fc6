#include "engine/asynchronous/host_copies.h"

#include <cstring>
#include <exception>
#include <string>

#include "engine/device/pinned_memory.h"
#include "runtime/base/log.h"

namespace tessera {
namespace {

std::int64_t copied_bytes_of(const FlatGroup& group) { return group.layout.numel() * 4; }

/// Returns an arena of `bytes` bytes of pinned memory.
Arena pinned_copies(DeviceKernels& kernels, std::int64_t bytes, int rank) {
  if (bytes == 0) return {};
  const AlignedMemory::Give give = pinned_memory_of(
      kernels, rank, "copies of a GPU's parameters and gradients",
      "[T1095] hint: start fewer ranks on a host, or leave \"sync\" out, which then needs no copies of them");
  return Arena::given("copies of parameters and gradients", bytes, give(static_cast<std::size_t>(bytes)));
}

}  // namespace

HostCopies::HostCopies(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                       const Accelerator& accelerator, int rank, Collectives* readers)
    : kernels_(accelerator.kernels.get()), gradient_bytes_(plan.use()[MemoryCategory::kGradients]) {
  if (!kernels_) return;
  std::int64_t bytes = 0;
  for_each_trainable(units, [&](const FlatGroup& group) { bytes += copied_bytes_of(group); });
  gradient_bytes_ = bytes;
  pinned_ = pinned_copies(*kernels_, 2 * bytes, rank);
  if (readers) shared_ = Arena::part_of_common("gradients", bytes, *readers);
  for (const auto& unit : units) {
    first_of_unit_.push_back(entries_.size());
    for (const auto& group : unit->groups) {
      Entry& added = entries_.emplace_back();
      if (!group->trainable) continue;
      added.group = group.get();
      added.values = pinned_.take(copied_bytes_of(*group));
      added.fetched = reinterpret_cast<float*>(pinned_.take(copied_bytes_of(*group)));
      added.gradient = readers ? reinterpret_cast<float*>(shared_.take(copied_bytes_of(*group))) : added.fetched;
    }
  }
  pinned_.expect_full();
  shared_.expect_full();
}

HostCopies::~HostCopies() {
  try {
    for (const Entry& each : entries_) {
      if (each.sent) each.sent->wait();
      if (each.came) each.came->wait();
    }
  } catch (const std::exception& error) {
    log_error(std::string("gradients and parameters on their way between GPU and host: ") + error.what());
  }
}

void HostCopies::open(const FlatGroup& group) {
  if (!kernels_) return;
  std::unique_ptr<Mark>& sent = entry(group).sent;
  if (sent) sent->wait();
  sent.reset();
}

void HostCopies::send(const FlatGroup& group) {
  if (!kernels_) return;
  Entry& of_group = entry(group);
  const DeviceKernels::UploadPiece piece{group.full, of_group.values, static_cast<std::size_t>(copied_bytes_of(group))};
  const std::unique_ptr<Mark> read = kernels_->mark();  // queued work may still read the previous values
  of_group.sent = kernels_->upload({&piece, 1}, read.get());
  of_group.sent->join();
}

void HostCopies::bring(const FlatGroup& group, Extent part) {
  if (!kernels_ || part.numel == 0) return;
  open(group);
  const std::int64_t begin = part.offset * 4;
  kernels_->download(entry(group).values + begin, group.full + begin, static_cast<std::size_t>(part.numel) * 4)->wait();
}

void HostCopies::forget_gradients() {
  for (Entry& each : entries_) each.is_fetched = false;
}

void HostCopies::fetch(const Unit& unit) {
  if (!kernels_) return;
  for (std::size_t i = 0; i < unit.groups.size(); ++i) {
    Entry& each = entries_[first_of_unit_[static_cast<std::size_t>(unit.index)] + i];
    if (each.group) fetch(each);
  }
}

void HostCopies::fetch(Entry& entry) {
  entry.came = kernels_->download(reinterpret_cast<std::byte*>(entry.fetched), entry.group->gradient,
                                  static_cast<std::size_t>(copied_bytes_of(*entry.group)));
  entry.is_fetched = true;
}

void HostCopies::await_gradients() {
  for (Entry& each : entries_) {
    if (each.group && !each.is_fetched) fetch(each);
  }
  for (Entry& each : entries_) {
    if (!each.group) continue;
    each.came->wait();
    each.came.reset();
    each.is_fetched = false;
    if (each.gradient != each.fetched)
      std::memcpy(each.gradient, each.fetched, static_cast<std::size_t>(copied_bytes_of(*each.group)));
  }
}

}  // namespace tessera
