#include "offload/file_tier.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "offload/files/sector.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

// This file moves records between slots and files.
//
// A slot is memory for one record. `get` finds the record's slot, or takes the slot whose record was put or released
// first (`take_slot`). If the slot does not have the record yet, `get` begins a read and waits for its end
// (`bring_in`). `fetch` only finds the slot and begins the read. `put` begins a write. `end_write` waits for the write:
// when the slot is needed, when `write_behind` other records have been put or released since, or in `flush`. The ring's
// tags are slot numbers. Copies need no slot, and have tags from kCopies on. The first failure is kept in `failure_`,
// and every call returns it.

/// the smallest tag of a copy in the ring; lower tags are those of slots
constexpr std::uint64_t kCopies = std::uint64_t{1} << 32;

}  // namespace

// ---- Set-up
// ----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<FileTier>> FileTier::create(const FileTierOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const Sizes sizes, sizes_of(options));
  std::unique_ptr<FileTier> tier(new FileTier(options, sizes));
  TESSERA_RETURN_IF_ERROR(tier->take_files());
  TESSERA_RETURN_IF_ERROR(tier->take_memory());
  if (sizes.on_disk == 0) return tier;
  TESSERA_ASSIGN_OR_RETURN(tier->ring_, IoRing::make(options.io));
  std::vector<const BlockFile*> files;
  for (const auto& file : tier->files_)
    if (file != nullptr) files.push_back(file.get());
  const std::span<std::byte> memory[] = {tier->slot_memory_.span()};
  tier->ring_->register_resources(files, memory);
  return tier;
}

FileTier::FileTier(const FileTierOptions& options, const Sizes& sizes)
    : options_(options), sizes_(sizes), resident_(spread_of(options, sizes.resident)) {}

absl::Status FileTier::take_files() {
  for (std::size_t i = 0; i < options_.paths.size(); ++i) {
    files_.emplace_back();
    if (sizes_.file_records[i] == 0) continue;
    TESSERA_ASSIGN_OR_RETURN(files_.back(), BlockFile::create({.directory = options_.paths[i].directory,
                                                               .bytes = sizes_.file_bytes[i],
                                                               .who = options_.who,
                                                               .direct = options_.direct,
                                                               .write_zeros = options_.write_zeros,
                                                               .name = options_.durable,
                                                               .must_be_there = options_.durable_is_there}));
  }
  return absl::OkStatus();
}

absl::Status FileTier::take_memory() {
  const std::string& who = options_.who;
  const std::size_t records = as_size(sizes_.on_disk), resident = as_size(sizes_.resident);
  TESSERA_ASSIGN_OR_RETURN(resident_memory_,
                           AlignedMemory::make(resident * options_.record_bytes, who, options_.memory));
  TESSERA_ASSIGN_OR_RETURN(resident_held_, Table<std::uint8_t>::make(resident, who));
  TESSERA_ASSIGN_OR_RETURN(slot_memory_, AlignedMemory::make(sizes_.slots * sizes_.stride_bytes, who, options_.memory));
  TESSERA_ASSIGN_OR_RETURN(slots_, Table<Slot>::make(sizes_.slots, who));
  TESSERA_ASSIGN_OR_RETURN(disk_.slot_of, Table<std::int32_t>::make(records, who));
  TESSERA_ASSIGN_OR_RETURN(disk_.places, Table<StripePlace>::make(records, who));
  TESSERA_ASSIGN_OR_RETURN(disk_.offsets, Table<std::int64_t>::make(records, who));
  TESSERA_ASSIGN_OR_RETURN(disk_.written, Table<std::uint8_t>::make(records, who));
  if (has_checksums(options_)) {
    TESSERA_ASSIGN_OR_RETURN(disk_.checksums, Table<std::uint64_t>::make(records, who));
  }
  if (!options_.durable.empty()) {
    TESSERA_ASSIGN_OR_RETURN(disk_.two_places, TwoPlaces::make(records, who));
  }
  for (Slot& slot : slots_.span()) slot.record = -1;
  if (records == 0) return absl::OkStatus();
  place_in_stripes(weights_of(options_), disk_.places.span());
  std::vector<std::int64_t> ends(options_.paths.size(), 0);
  for (std::int64_t record = 0; record < options_.records; ++record) {
    if (!is_on_disk(record)) continue;
    const std::size_t which = on_disk(record);
    std::int64_t& end = ends[as_size(disk_.places[which].file)];
    disk_.offsets[which] = end;
    end += static_cast<std::int64_t>(whole_sectors(size_of(options_, record)));
  }
  return absl::OkStatus();
}

FileTier::~FileTier() {
  if (ring_ == nullptr) return;
  if (const absl::Status status = ring_->drain(); !status.ok() && failure_.ok()) log_error(message_of(status));
}

// ---- Functions for callers
// --------------------------------------------------------------------------------------------

bool FileTier::fetch(std::int64_t record) {
  if (!failure_.ok() || !is_on_disk(record)) return true;
  // The ring lets a request wait while `in_flight` earlier requests are under way.
  const int most = std::min(options_.read_ahead + options_.write_behind,
                            std::max(options_.read_ahead, options_.io.in_flight - options_.write_behind));
  const bool has_room = options_.read_ahead > 0 && fetched_ < most;
  if (const std::int32_t found = slot_of(record); found > 0) {
    Slot& slot = slots_[as_size(found - 1)];
    const bool is_free = slot.state == SlotState::kFree;
    if (!is_free && (slot.state != SlotState::kWriting || slot.wanted)) return true;
    if (!has_room) return false;
    if (is_free) slot.state = SlotState::kFetched;
    if (!is_free) slot.wanted = true;
    ++fetched_;
    return true;
  }
  if (disk_.written[on_disk(record)] == 0) return true;  // a record of zeros need not be read
  if (!has_room) return false;
  failure_.Update(end_writes_that_are_done());
  const std::optional<std::size_t> next = next_slot();
  if (!failure_.ok() || !next || slots_[*next].state == SlotState::kWriting) return false;
  reuse_slot(*next, record);
  failure_.Update(start_read(*next, record));
  return true;
}

absl::StatusOr<std::span<std::byte>> FileTier::get(std::int64_t record) {
  TESSERA_RETURN_IF_ERROR(end_writes_that_are_done());
  if (record < 0 || record >= options_.records)
    return wrong_use(fmt::format("get of record {}, want 0 to {}", record, options_.records - 1));
  const bool is_resident = resident_.has(record);
  const std::int32_t found = is_resident ? 0 : slot_of(record);
  const bool is_held = holds(record);
  if (!is_held && held_ >= options_.most_held)
    return wrong_use(
        fmt::format("get of record {} while {} are held, and most_held is {}", record, held_, options_.most_held));
  ++counters_.gets;
  if (is_resident) {
    if (!is_held) ++held_;
    resident_held_[as_size(resident_.index(record))] = 1;
    ++counters_.hits;
    return resident_memory(record).first(size_of(options_, record));
  }
  std::size_t index = as_size(found - 1);
  if (found == 0) {
    TESSERA_ASSIGN_OR_RETURN(index, take_slot(record));
  }
  if (!is_held) TESSERA_RETURN_IF_ERROR(bring_in(index));
  Slot& slot = slots_[index];
  if (!slot.was_read) ++counters_.hits;
  slot.was_read = false;
  return memory_of_slot(index).first(size_of(options_, record));
}

absl::StatusOr<std::span<std::byte>> FileTier::get_to_overwrite(std::int64_t record) {
  const bool may_hold = failure_.ok() && held_ < options_.most_held;
  if (is_on_disk(record) && may_hold && slot_of(record) == 0) {
    TESSERA_ASSIGN_OR_RETURN(const std::size_t slot, take_slot(record));
    slots_[slot].unverified = false;
  }
  return get(record);
}

absl::Status FileTier::put(std::int64_t record) { return let_go(record, true); }

absl::Status FileTier::put_if_changed(std::int64_t record) {
  if (!is_on_disk(record) || !holds(record)) return let_go(record, true);
  const std::size_t which = on_disk(record);
  const std::uint64_t checksum = checksum_of_slot(as_size(slot_of(record) - 1));
  return let_go(record, disk_.written[which] == 0 || disk_.checksums[which] != checksum, checksum);
}

absl::Status FileTier::release(std::int64_t record) { return let_go(record, false); }

absl::Status FileTier::start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) {
  TESSERA_RETURN_IF_ERROR(end_writes_that_are_done());
  if (record < 0 || record >= options_.records)
    return wrong_use(fmt::format("copy of record {}, want 0 to {}", record, options_.records - 1));
  const std::size_t bytes = whole_sectors(size_of(options_, record));
  if (memory.size() != bytes)
    return wrong_use(fmt::format("copy of record {} to {} bytes, want {}", record, memory.size(), bytes));
  if (holds(record)) return wrong_use(fmt::format("copy of record {}, which is held", record));
  ++counters_.gets;
  if (resident_.has(record) || disk_.written[on_disk(record)] == 0) {
    ++counters_.hits;
    std::ranges::fill(memory, std::byte{0});
    if (resident_.has(record)) std::memcpy(memory.data(), resident_memory(record).data(), size_of(options_, record));
    return absl::OkStatus();
  }
  if (const std::int32_t found = slot_of(record); found > 0 && slots_[as_size(found - 1)].state == SlotState::kWriting)
    TESSERA_RETURN_IF_ERROR(end_write(as_size(found - 1)));
  IoRequest read = request_of(record);
  read.memory = memory.data();
  read.tag = kCopies + ++copies_begun_;
  copies_.push_back({record, memory, tag, read.tag, /*ended=*/false});
  return hand_over(record, read);
}

absl::Status FileTier::end_copies(std::uint64_t tag) {
  absl::Status result = failure_;
  for (Copy& copy : copies_) {
    if (copy.tag == tag) result.Update(end_copy(copy));  // all copies are completed, even after one of them has failed
  }
  std::erase_if(copies_, [&](const Copy& copy) { return copy.tag == tag; });
  return result;
}

absl::Status FileTier::flush() {
  TESSERA_RETURN_IF_ERROR(failure_);
  for (std::size_t i = 0; i < slots_.span().size(); ++i) {
    if (slots_[i].state == SlotState::kWriting) TESSERA_RETURN_IF_ERROR(end_write(i));
    if (slots_[i].state != SlotState::kFetched) continue;
    TESSERA_RETURN_IF_ERROR(end_read(i));
    slots_[i].state = SlotState::kFree;
    slots_[i].order = ++order_;
  }
  fetched_ = 0;
  return absl::OkStatus();
}

absl::Status FileTier::end_writes() {
  failure_.Update(sync_failure_);
  TESSERA_RETURN_IF_ERROR(failure_);
  for (std::size_t i = 0; i < slots_.span().size(); ++i) {
    if (slots_[i].state == SlotState::kWriting) TESSERA_RETURN_IF_ERROR(end_write(i));
  }
  return absl::OkStatus();
}

absl::Status FileTier::sync() {
  for (const auto& file : files_) {
    if (file != nullptr) sync_failure_.Update(file->sync(options_.who));
  }
  return sync_failure_;
}

absl::Status FileTier::return_to(std::string_view where) {
  TESSERA_RETURN_IF_ERROR(flush());
  if (held_ > 0 || !copies_.empty())
    return wrong_use("records are held, or being copied, while others take their place");
  for (Slot& slot : slots_.span()) {
    if (slot.record >= 0) slot_of(slot.record) = 0;
    slot.record = -1;
  }
  return disk_.two_places.return_to(where, disk_.written, disk_.checksums);
}

TierCounters FileTier::counters() const {
  TierCounters counters = counters_;
  if (ring_ == nullptr) return counters;
  counters.wait_seconds = ring_->counters().wait_seconds;
  return counters;
}

std::string FileTier::describe() const {
  std::string text = fmt::format("{} records of {}, {} of them in memory", options_.records,
                                 format_bytes(static_cast<std::int64_t>(options_.record_bytes)), sizes_.resident);
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (files_[i] != nullptr)
      text += fmt::format(", {} in {} ({})", sizes_.file_records[i], options_.paths[i].directory, files_[i]->mode());
  }
  if (ring_ != nullptr) text += fmt::format("; {} slots; {}", sizes_.slots, ring_->describe());
  return text;
}

// ---- Slots
// -----------------------------------------------------------------------------------------------------------

std::span<std::byte> FileTier::memory_of_slot(std::size_t slot) const {
  return slot_memory_.span().subspan(slot * sizes_.stride_bytes, sizes_.stride_bytes);
}

std::span<std::byte> FileTier::resident_memory(std::int64_t record) const {
  return resident_memory_.span().subspan(as_size(resident_.index(record)) * options_.record_bytes,
                                         options_.record_bytes);
}

std::int32_t& FileTier::slot_of(std::int64_t record) const { return disk_.slot_of[on_disk(record)]; }

bool FileTier::holds(std::int64_t record) const {
  if (resident_.has(record)) return resident_held_[as_size(resident_.index(record))] != 0;
  const std::int32_t found = slot_of(record);
  return found > 0 && slots_[as_size(found - 1)].state == SlotState::kHeld;
}

// Returns the slot to use for another record. Among the slots that are neither held nor read ahead, it is the slot
// whose record was put or released first. The write of this record may still be under way.
std::optional<std::size_t> FileTier::next_slot() const {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < slots_.span().size(); ++i) {
    const Slot& slot = slots_[i];
    const bool is_at_rest = slot.state == SlotState::kFree || (slot.state == SlotState::kWriting && !slot.wanted);
    if (is_at_rest && (!best || slot.order < slots_[*best].order)) best = i;
  }
  return best;
}

// Takes a slot for a `get`. A slot is always available, because at most `most_held - 1` slots are held, and at most
// `read_ahead + write_behind` slots are read ahead. The tier has fewer than `most_held + read_ahead + write_behind`
// slots only if each record has its own slot. In that case one slot is free, since this record does not have its slot
// yet.
absl::StatusOr<std::size_t> FileTier::take_slot(std::int64_t record) {
  const std::size_t index = *next_slot();
  if (slots_[index].state == SlotState::kWriting) TESSERA_RETURN_IF_ERROR(end_write(index));
  reuse_slot(index, record);
  return index;
}

void FileTier::reuse_slot(std::size_t index, std::int64_t record) {
  Slot& slot = slots_[index];
  if (slot.record >= 0) slot_of(slot.record) = 0;
  slot = Slot{.record = record,
              .order = slot.order,
              .state = SlotState::kFree,
              .reading = false,
              .was_read = false,
              .unverified = false,
              .wanted = false};
  slot_of(record) = static_cast<std::int32_t>(index) + 1;
  if (disk_.written[on_disk(record)] == 0)
    std::ranges::fill(memory_of_slot(index), std::byte{0});
  else
    slot.unverified = true;
}

IoRequest FileTier::request(IoKind kind, std::size_t slot) const {
  IoRequest request = request_of(slots_[slot].record);
  request.kind = kind;
  request.memory = memory_of_slot(slot).data();
  request.tag = slot;
  return request;
}

// Returns a read without its destination and its tag, which the caller sets.
IoRequest FileTier::request_of(std::int64_t record) const {
  const std::size_t which = on_disk(record), file = as_size(disk_.places[which].file);
  const bool is_second = !options_.durable.empty() && disk_.two_places.place(which) == 1;
  return {.kind = IoKind::kRead,
          .file = files_[file].get(),
          .offset = disk_.offsets[which] + (is_second ? sizes_.file_bytes[file] / 2 : 0),
          .memory = nullptr,
          .bytes = whole_sectors(size_of(options_, record)),
          .who = options_.who,
          .tag = 0};
}

// Begins the request and counts it.
absl::Status FileTier::hand_over(std::int64_t record, const IoRequest& request) {
  const bool is_read = request.kind == IoKind::kRead;
  ++(is_read ? counters_.reads : counters_.writes);
  (is_read ? counters_.bytes_read : counters_.bytes_written) += static_cast<std::int64_t>(request.bytes);
  if (absl::Status status = ring_->submit(request); !status.ok()) return fail(record, status);
  if (absl::Status status = ring_->start(); !status.ok()) return fail(record, status);
  return absl::OkStatus();
}

// ---- Reading
// ---------------------------------------------------------------------------------------------------------

absl::Status FileTier::start_read(std::size_t index, std::int64_t record) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kFetched;
  slot.reading = slot.was_read = true;
  ++fetched_;
  return hand_over(record, request(IoKind::kRead, index));
}

absl::Status FileTier::end_read(std::size_t index) {
  Slot& slot = slots_[index];
  if (!slot.reading) return absl::OkStatus();
  slot.reading = false;
  if (absl::Status status = ring_->wait(index); !status.ok()) return fail(slot.record, status);
  return absl::OkStatus();
}

absl::Status FileTier::verify(std::size_t index) {
  Slot& slot = slots_[index];
  if (!slot.unverified) return absl::OkStatus();
  slot.unverified = false;
  return verify(slot.record, memory_of_slot(index).first(whole_sectors(size_of(options_, slot.record))));
}

// `memory`: the bytes that were read, in whole blocks.
absl::Status FileTier::verify(std::int64_t record, std::span<const std::byte> memory) {
  if (!has_checksums(options_)) return absl::OkStatus();
  const std::uint64_t got = XXH3_64bits(memory.data(), memory.size());
  const std::uint64_t want = disk_.checksums[on_disk(record)];
  if (got == want) return absl::OkStatus();
  const IoRequest read = request_of(record);
  return fail(
      record,
      make_error(ExitCode::kCorruptData,
                 fmt::format("{}: read of {} at offset {}: {} bytes with checksum {:016x}, and {:016x} was written. "
                             "[T0375] hint: the disk or its path changed the data; name a directory on another disk",
                             options_.who, read.file->name(), read.offset, read.bytes, got, want)));
}

absl::Status FileTier::end_copy(Copy& copy) {
  if (std::exchange(copy.ended, true)) return absl::OkStatus();
  if (absl::Status status = ring_->wait(copy.request); !status.ok()) return fail(copy.record, status);
  return verify(copy.record, copy.memory);
}

// Brings a slot into the state kHeld, with its record in memory: reads the record first, if necessary.
absl::Status FileTier::bring_in(std::size_t index) {
  Slot& slot = slots_[index];
  if (slot.state == SlotState::kWriting) TESSERA_RETURN_IF_ERROR(end_write(index));
  if (slot.state == SlotState::kFree && slot.unverified && !slot.was_read)
    TESSERA_RETURN_IF_ERROR(start_read(index, slot.record));
  if (slot.state == SlotState::kFetched) --fetched_;
  TESSERA_RETURN_IF_ERROR(end_read(index));
  TESSERA_RETURN_IF_ERROR(verify(index));
  slot.state = SlotState::kHeld;
  ++held_;
  return absl::OkStatus();
}

// ---- Writing
// ---------------------------------------------------------------------------------------------------------

std::uint64_t FileTier::checksum_of_slot(std::size_t index) const {
  return XXH3_64bits(memory_of_slot(index).data(), whole_sectors(size_of(options_, slots_[index].record)));
}

absl::Status FileTier::let_go(std::int64_t record, bool changed, std::optional<std::uint64_t> checksum) {
  TESSERA_RETURN_IF_ERROR(end_writes_that_are_done());
  const bool in_range = record >= 0 && record < options_.records;
  if (!in_range || !holds(record))
    return wrong_use(fmt::format("{} of record {}, which is not held", changed ? "put" : "release", record));
  --held_;
  if (resident_.has(record)) {
    resident_held_[as_size(resident_.index(record))] = 0;
    return absl::OkStatus();
  }
  const std::size_t index = as_size(slot_of(record) - 1);
  slots_[index].order = ++order_;
  TESSERA_RETURN_IF_ERROR(end_writes_behind());
  if (seeded_fault(SeededFault::kRecordWrittenOnce) && disk_.written[on_disk(record)] != 0) changed = false;
  if (changed) return start_write(index, checksum);
  slots_[index].state = SlotState::kFree;
  return absl::OkStatus();
}

absl::Status FileTier::start_write(std::size_t index, std::optional<std::uint64_t> checksum) {
  Slot& slot = slots_[index];
  const std::size_t which = on_disk(slot.record);
  for (Copy& copy : copies_) {
    if (copy.record == slot.record) TESSERA_RETURN_IF_ERROR(end_copy(copy));
  }
  disk_.written[which] = 1;
  if (has_checksums(options_)) disk_.checksums[which] = checksum ? *checksum : checksum_of_slot(index);
  if (!options_.durable.empty()) disk_.two_places.place_to_write(which);
  slot.state = SlotState::kWriting;
  slot.wanted = false;
  ++writing_;
  TESSERA_RETURN_IF_ERROR(hand_over(slot.record, request(IoKind::kWrite, index)));
  return options_.write_behind == 0 ? end_write(index) : absl::OkStatus();
}

// Waits for a slot's write if at least `write_behind` records were put or released after the slot's record. So at least
// `read_ahead` slots are available for reading.
absl::Status FileTier::end_writes_behind() {
  const auto behind = static_cast<std::uint64_t>(options_.write_behind);
  for (std::size_t i = 0; i < slots_.span().size(); ++i) {
    if (slots_[i].state == SlotState::kWriting && slots_[i].order + behind <= order_)
      TESSERA_RETURN_IF_ERROR(end_write(i));
  }
  return absl::OkStatus();
}

absl::Status FileTier::end_write(std::size_t index) {
  Slot& slot = slots_[index];
  if (absl::Status status = ring_->wait(index); !status.ok()) return fail(slot.record, status);
  slot.state = slot.wanted ? SlotState::kFetched : SlotState::kFree;
  slot.wanted = false;
  --writing_;
  return absl::OkStatus();
}

absl::Status FileTier::end_writes_that_are_done() {
  TESSERA_RETURN_IF_ERROR(failure_);
  if (writing_ == 0) return absl::OkStatus();
  if (absl::Status status = ring_->poll(); !status.ok()) return fail(-1, status);
  for (std::size_t i = 0; i < slots_.span().size(); ++i) {
    if (slots_[i].state == SlotState::kWriting && !ring_->busy(i)) TESSERA_RETURN_IF_ERROR(end_write(i));
  }
  return absl::OkStatus();
}

// ---- Errors
// ----------------------------------------------------------------------------------------------------------

absl::Status FileTier::wrong_use(const std::string& what) {
  failure_ = make_error(ExitCode::kInternal, fmt::format("{}: {}", options_.who, what));
  return failure_;
}

// Keeps the first error. If `record` is negative, the error does not belong to a particular record.
absl::Status FileTier::fail(std::int64_t record, const absl::Status& status) {
  const std::string prefix = record < 0 ? std::string() : name_of(record) + ": ";
  if (failure_.ok()) failure_ = make_error(exit_code_of(status), prefix + message_of(status));
  return failure_;
}

std::string FileTier::name_of(std::int64_t record) const {
  if (options_.record_name == nullptr) return fmt::format("record {}", record);
  return fmt::format("record {} ({})", record, options_.record_name(record));
}

}  // namespace tessera
