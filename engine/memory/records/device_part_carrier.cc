#include "engine/memory/records/device_part_carrier.h"

#include <algorithm>
#include <utility>

#include "engine/device/pinned_memory.h"
#include "engine/memory/records/record_places.h"
#include "runtime/comm/device/device_memory.h"
#include "sharding/unrecorded.h"

namespace tessera {

DevicePartCarrier::DevicePartCarrier(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                     std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, int rank)
    : PartCarrier(units, std::move(records)),
      kernels_(kernels),
      take_memory_(pinned_memory_of(
          kernels, rank, "parameters on their way to the GPU",
          "[T0221] hint: units of fewer parameters (\"units\"), or a smaller \"prefetch\", need less of it")),
      are_in_files_(!plan.parameters_on_host()),
      piece_bytes_(static_cast<std::size_t>(plan.slots().upload_piece_bytes)),
      coming_(units.size()),
      ends_(
          records_, "parameters on their way to the GPU", [this] { settle(); }, /*visits=*/!are_in_files_) {
  for (std::int64_t i = 0; i < plan.slots().upload_pieces(); ++i) {
    pieces_.push_back({take_memory_(piece_bytes_), nullptr});
    pinned_bytes_ += plan.slots().upload_piece_bytes;
  }
  if (are_in_files_) return;  // if the records lie in files, copies read from pieces and not from records
  for (const std::span<std::byte> place : places_of(*records_)) places_.push_back(place.data());
}

/// Waits for all copies. Copies end in the order in which they were queued, so waiting for the last one is enough.
void DevicePartCarrier::settle() {
  for (const Coming& unit : coming_) {
    for (const auto& copy : unit.copies) copy->wait();
  }
  if (const auto last = std::exchange(last_, nullptr)) last->wait();
}

void DevicePartCarrier::start(const FlatGroup& group) {
  std::byte* const memory = group.part_in_full();
  const Chunks& chunks = group.parameters_below.chunks;
  const std::int64_t element = group.element_bytes();
  if (const std::int64_t bytes = chunks.before_records() * element; bytes > 0) {
    const Unrecorded unrecorded;
    const auto count = static_cast<std::size_t>(bytes);
    tensor_on(group.device, memory, count).copy_(tensor_on(group.device, group.shard, count));
  }
  if (chunks.records() == 0) return;
  if (are_in_files_) return read(group);
  std::vector<DeviceKernels::UploadPiece> uploads;
  for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk) {
    const Extent place = chunks.chunk(chunk);
    const std::byte* const from =
        places_[static_cast<std::size_t>(group.parameters_below.first_record + chunk - chunks.first_record())];
    const auto bytes = static_cast<std::size_t>(place.numel * element);
    std::byte* const to = memory + place.offset * element;
    uploaded_bytes_ += static_cast<std::int64_t>(bytes);
    const bool goes_on = !uploads.empty() && uploads.back().pinned + uploads.back().bytes == from;
    goes_on ? static_cast<void>(uploads.back().bytes += bytes) : uploads.push_back({to, from, bytes});
  }
  const std::unique_ptr<Mark> begun = kernels_.mark();
  coming(*group.unit).copies.push_back(kernels_.upload(uploads, begun.get()));
}

/// Begins to read a group's records into the piece of pinned memory that the unit has taken.
void DevicePartCarrier::read(const FlatGroup& group) {
  std::byte* const memory = group.part_in_full();
  Coming& unit = coming(*group.unit);
  const Chunks& chunks = group.parameters_below.chunks;
  if (unit.uploads.empty()) {
    unit.piece = take_piece();
    unit.used = 0;
    unit.begun = kernels_.mark();
  }
  const std::int64_t element = group.element_bytes(), before = chunks.before_records();
  std::byte* const pinned = pieces_[unit.piece].memory.get() + unit.used;
  const auto bytes = static_cast<std::size_t>((chunks.numel() - before) * element);
  unit.uploads.push_back({memory + before * element, pinned, bytes});
  unit.used += bytes;
  start_copies(group, pinned);
}

/// Takes a piece that no unit has, and waits for the last copy out of it. If units have all pieces, it makes a new
/// piece. If more units are gathered than the plan has slots, more pieces are needed than the plan has.
std::size_t DevicePartCarrier::take_piece() {
  auto idle = std::ranges::find_if(pieces_, [](const Piece& piece) { return !piece.is_taken; });
  if (idle == pieces_.end()) {
    pieces_.push_back({take_memory_(piece_bytes_), nullptr});
    pinned_bytes_ += static_cast<std::int64_t>(piece_bytes_);
    idle = std::prev(pieces_.end());
  }
  if (idle->copied) std::exchange(idle->copied, nullptr)->wait();
  idle->is_taken = true;
  return static_cast<std::size_t>(idle - pieces_.begin());
}

std::span<std::byte> DevicePartCarrier::take(std::int64_t unit, LeaseUse /*use*/) {
  Coming& parts = coming_[static_cast<std::size_t>(unit)];
  for (auto& copy : parts.copies) {
    copy->join();
    last_ = std::move(copy);
  }
  parts.copies.clear();
  if (parts.uploads.empty()) return {};
  Piece& piece = pieces_[parts.piece];
  const std::vector<DeviceKernels::UploadPiece> uploads = std::exchange(parts.uploads, {});
  piece.is_taken = false;
  records_->end_copies(static_cast<std::uint64_t>(unit));
  piece.copied = last_ = kernels_.upload(uploads, parts.begun.get());
  piece.copied->join();
  for (const DeviceKernels::UploadPiece& each : uploads) uploaded_bytes_ += static_cast<std::int64_t>(each.bytes);
  return {};
}

}  // namespace tessera
