#include "offload/spill.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "offload/files/scratch_directory.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

// This file transfers values between slots and scratch files.
//
// `put` cuts a value into pieces and writes each piece through a slot. `put_piece` reserves space on the disk, copies
// the bytes into an empty slot, and begins the write. `get` copies each piece out of its slot; `read` reads the piece
// first if no slot has it. Then `read_ahead` begins to read the next pieces. If all slots are full, the slot whose
// piece is needed last is emptied (`slot_to_empty`, `is_needed_later`). The ring's tags are slot numbers. If a value is
// dropped while a transfer of it is under way, `end_transfer` frees its space on the disk.

constexpr std::int64_t kLeastPieces = 16;  // a new file has room for at least this many pieces
constexpr int kMostQueueDepth = 32;

absl::Status check_options(const SpillOptions& options) {
  if (options.piece_bytes >= 1 && options.piece_bytes <= (std::size_t{1} << 40) && options.queue_depth >= 1 &&
      options.queue_depth <= kMostQueueDepth && !options.directories.empty())
    return absl::OkStatus();
  return make_error(
      ExitCode::kInternal,
      fmt::format("{}: pieces of {} bytes, queue_depth {}, {} directories: want 1 to 2^40, 1 to {}, at least 1",
                  options.who, options.piece_bytes, options.queue_depth, options.directories.size(), kMostQueueDepth));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Spill>> Spill::create(SpillOptions options) {
  TESSERA_RETURN_IF_ERROR(check_options(options));
  for (const std::string& directory : options.directories) {
    TESSERA_RETURN_IF_ERROR(look_at_scratch_directory(directory, options.who).status());
  }
  std::unique_ptr<Spill> spill(new Spill(std::move(options)));
  TESSERA_ASSIGN_OR_RETURN(
      spill->memory_,
      AlignedMemory::make(memory_bytes(spill->options_.piece_bytes, spill->options_.queue_depth), spill->options_.who));
  TESSERA_ASSIGN_OR_RETURN(spill->ring_, IoRing::make(spill->options_.io));
  const std::span<std::byte> memory[] = {spill->memory_.span()};
  spill->ring_->register_resources({}, memory);
  return spill;
}

Spill::Spill(SpillOptions options) : options_(std::move(options)), slots_(slots_of(options_.queue_depth)) {
  const auto piece = static_cast<std::int64_t>(whole_sectors(options_.piece_bytes));
  for (const std::string& directory : options_.directories) {
    // Writing zeros first would mean writing the whole file once, in the middle of the first step.
    rooms_.emplace_back(
        BlockFileOptions{
            .directory = directory, .bytes = 0, .who = options_.who, .direct = options_.direct, .write_zeros = false},
        kLeastPieces * piece);
  }
}

Spill::~Spill() {
  if (ring_ == nullptr) return;
  if (const absl::Status status = ring_->drain(); !status.ok() && failure_.ok()) log_error(message_of(status));
}

std::int64_t Spill::file_bytes() const {
  std::int64_t bytes = 0;
  for (const ScratchRoom& room : rooms_) bytes += room.file_bytes();
  return bytes;
}

std::int64_t Spill::taken_bytes() const {
  std::int64_t bytes = 0;
  for (const ScratchRoom& room : rooms_) bytes += room.taken_bytes();
  return bytes;
}

TierCounters Spill::counters() const {
  TierCounters counters = counters_;
  counters.wait_seconds = ring_->counters().wait_seconds;
  return counters;
}

std::span<std::byte> Spill::memory_of(int slot) const {
  const std::size_t stride = whole_sectors(options_.piece_bytes);
  return memory_.span().subspan(static_cast<std::size_t>(slot) * stride, stride);
}

absl::Status Spill::fail(const absl::Status& status) {
  if (failure_.ok()) failure_ = status;
  return failure_;
}

// ---- What the caller does
// --------------------------------------------------------------------------------------------

absl::StatusOr<Spill::Id> Spill::put(std::span<const std::byte> bytes) {
  TESSERA_RETURN_IF_ERROR(failure_);
  if (bytes.empty()) return fail(make_error(ExitCode::kInternal, options_.who + ": put of no bytes"));
  const Id id = next_++;
  std::vector<Piece>& pieces = values_[id];
  pieces.resize((bytes.size() + options_.piece_bytes - 1) / options_.piece_bytes);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::size_t begin = i * options_.piece_bytes;
    pieces[i].bytes = std::min(options_.piece_bytes, bytes.size() - begin);
    if (absl::Status status = put_piece(id, i, pieces[i], bytes.subspan(begin, pieces[i].bytes)); !status.ok()) {
      drop(id);
      return fail(status);
    }
  }
  if (absl::Status status = ring_->start(); !status.ok()) return fail(status);
  return id;
}

absl::Status Spill::put_piece(Id id, std::size_t index, Piece& piece, std::span<const std::byte> bytes) {
  TESSERA_ASSIGN_OR_RETURN(const int slot, empty_slot());
  ScratchRoom& directory = rooms_[std::exchange(turn_, (turn_ + 1) % rooms_.size())];
  TESSERA_ASSIGN_OR_RETURN(piece.room, directory.take(whole_sectors(bytes.size())));
  const std::span<std::byte> memory = memory_of(slot).first(piece.room.bytes);
  std::memcpy(memory.data(), bytes.data(), bytes.size());
  std::ranges::fill(memory.subspan(bytes.size()), std::byte{0});
  if (options_.verify) piece.checksum = XXH3_64bits(memory.data(), memory.size());
  piece.slot = slot;
  slots_[static_cast<std::size_t>(slot)] = {.state = SlotState::kWriting, .id = id, .piece = index, .room = piece.room};
  return transfer(IoKind::kWrite, slot, piece);
}

absl::Status Spill::get(Id id, std::span<std::byte> memory) {
  TESSERA_RETURN_IF_ERROR(failure_);
  const auto found = values_.find(id);
  if (found == values_.end())
    return fail(make_error(ExitCode::kInternal, fmt::format("{}: value {} is not there", options_.who, id)));
  ++counters_.gets;
  bool was_read = false;
  for (std::size_t i = 0, begin = 0; i < found->second.size(); begin += found->second[i++].bytes) {
    Piece& piece = found->second[i];
    if (absl::Status status = end_what_has_ended(); !status.ok()) return fail(status);
    if (piece.slot < 0) {
      const absl::StatusOr<int> slot = empty_slot();
      if (!slot.ok()) return fail(slot.status());
      if (absl::Status status = read(id, i, *slot); !status.ok()) return fail(status);
    }
    const int at = piece.slot;
    Slot& slot = slots_[static_cast<std::size_t>(at)];
    slot.was_got = false;  // so that read_ahead does not take this slot
    if (absl::Status status = read_ahead(id, i); !status.ok()) return fail(status);
    was_read |= slot.unverified;
    if (slot.state == SlotState::kReading) {
      if (absl::Status status = end_transfer(at); !status.ok()) return fail(status);
    }
    if (absl::Status status = verify(at, piece); !status.ok()) return fail(status);
    std::memcpy(memory.data() + begin, memory_of(at).data(), piece.bytes);
    slot.was_got = true;
  }
  counters_.hits += was_read ? 0 : 1;
  return absl::OkStatus();
}

void Spill::drop(Id id) {
  const auto found = values_.find(id);
  if (found == values_.end()) return;
  for (const Piece& piece : found->second) {
    if (piece.room.file == nullptr) continue;
    if (piece.slot >= 0) {
      Slot& slot = slots_[static_cast<std::size_t>(piece.slot)];
      const bool is_moving = slot.state == SlotState::kWriting || slot.state == SlotState::kReading;
      slot.id = kNone;
      if (is_moving) continue;  // end_transfer frees the space on the disk later
      slot = {};
    }
    room_of(piece.room).give_back(piece.room);
  }
  values_.erase(found);
}

// ---- Slots
// -----------------------------------------------------------------------------------------------------------

/// Returns whether `get` will need the piece of `a` after the piece of `b`. A piece that was already got is needed
/// last.
bool Spill::is_needed_later(const Slot& a, const Slot& b) const {
  if (a.was_got != b.was_got) return a.was_got;
  if (a.id != b.id) return a.id < b.id;
  return a.piece > b.piece;
}

/// Returns a slot that has no transfer under way: a free slot, or else the slot whose piece is needed last. The second
/// kind of slot is returned only if its piece is needed later than the piece of `needed` (null: in any case). Returns
/// -1 if there is no such slot.
int Spill::slot_to_empty(const Slot* needed) const {
  int best = -1;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.state == SlotState::kFree) return static_cast<int>(i);
    if (slot.state != SlotState::kFilled || (needed && !is_needed_later(slot, *needed))) continue;
    if (best < 0 || is_needed_later(slot, slots_[static_cast<std::size_t>(best)])) best = static_cast<int>(i);
  }
  return best;
}

void Spill::empty(int index) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  if (slot.id != kNone) values_.at(slot.id)[slot.piece].slot = -1;
  slot = {};
}

/// Returns an empty slot. If no slot can be emptied at once, it waits for the oldest transfer.
absl::StatusOr<int> Spill::empty_slot() {
  for (;;) {
    TESSERA_RETURN_IF_ERROR(end_what_has_ended());
    if (const int slot = slot_to_empty(nullptr); slot >= 0) {
      empty(slot);
      return slot;
    }
    const auto oldest = std::ranges::min_element(slots_, {}, &Slot::begun);
    TESSERA_RETURN_IF_ERROR(end_transfer(static_cast<int>(oldest - slots_.begin())));
  }
}

// ---- Transfers
// -------------------------------------------------------------------------------------------------------

absl::Status Spill::transfer(IoKind kind, int slot, const Piece& piece) {
  const bool is_read = kind == IoKind::kRead;
  slots_[static_cast<std::size_t>(slot)].begun = ++begun_;
  ++(is_read ? counters_.reads : counters_.writes);
  (is_read ? counters_.bytes_read : counters_.bytes_written) += static_cast<std::int64_t>(piece.room.bytes);
  return ring_->submit({.kind = kind,
                        .file = piece.room.file,
                        .offset = piece.room.offset,
                        .memory = memory_of(slot).data(),
                        .bytes = piece.room.bytes,
                        .who = options_.who,
                        .tag = static_cast<std::uint64_t>(slot)});
}

/// Waits for a slot's transfer, and handles its result.
absl::Status Spill::end_transfer(int index) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  TESSERA_RETURN_IF_ERROR(ring_->wait(static_cast<std::uint64_t>(index)));
  if (slot.id == kNone) {
    room_of(slot.room).give_back(slot.room);
    slot = {};
  } else {
    slot.state = SlotState::kFilled;
  }
  return absl::OkStatus();
}

absl::Status Spill::end_what_has_ended() {
  TESSERA_RETURN_IF_ERROR(ring_->poll());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const bool is_moving = slots_[i].state == SlotState::kWriting || slots_[i].state == SlotState::kReading;
    if (is_moving && !ring_->busy(i)) TESSERA_RETURN_IF_ERROR(end_transfer(static_cast<int>(i)));
  }
  return absl::OkStatus();
}

absl::Status Spill::read(Id id, std::size_t index, int slot) {
  Piece& piece = values_.at(id)[index];
  piece.slot = slot;
  slots_[static_cast<std::size_t>(slot)] = {
      .state = SlotState::kReading, .id = id, .piece = index, .unverified = true, .room = piece.room};
  return transfer(IoKind::kRead, slot, piece);
}

/// Begins to read the pieces that follow a piece, and submits these reads.
absl::Status Spill::read_ahead(Id id, std::size_t index) {
  auto value = values_.find(id);
  for (int ahead = 0; ahead < options_.queue_depth; ++ahead) {
    if (++index == value->second.size()) {
      if (value == values_.begin()) break;
      --value;
      index = 0;
    }
    if (value->second[index].slot >= 0) continue;
    Slot needed;
    needed.id = value->first;
    needed.piece = index;
    const int slot = slot_to_empty(&needed);
    if (slot < 0) break;
    empty(slot);
    TESSERA_RETURN_IF_ERROR(read(value->first, index, slot));
  }
  return ring_->start();
}

absl::Status Spill::verify(int index, const Piece& piece) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  if (!std::exchange(slot.unverified, false) || !options_.verify) return absl::OkStatus();
  const std::uint64_t got = XXH3_64bits(memory_of(index).data(), piece.room.bytes);
  if (got == piece.checksum) return absl::OkStatus();
  return make_error(
      ExitCode::kCorruptData,
      fmt::format("{}: read of {} at offset {}: {} bytes with checksum {:016x}, and {:016x} was written. "
                  "[T0380] hint: the disk or its path changed the data; name a directory on another disk",
                  options_.who, piece.room.file->name(), piece.room.offset, piece.room.bytes, got, piece.checksum));
}

ScratchRoom& Spill::room_of(const Room& room) {
  return *std::ranges::find_if(rooms_, [&](const ScratchRoom& each) { return each.holds(room); });
}

}  // namespace tessera
