#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "offload/durable_tier.h"
#include "offload/files/aligned_memory.h"
#include "offload/io/io_ring.h"
#include "offload/stripes.h"
#include "offload/table.h"
#include "offload/tier.h"
#include "offload/two_places.h"
#include "runtime/base/even_spread.h"

namespace tessera {

/// A directory for a part of the records, on a disk of its own.
struct StripePath {
  std::string directory;
  double weight = 1.0;  ///< its share of the records, in proportion: the disk's bandwidth in any unit
};

struct FileTierOptions {
  std::int64_t records = 0;      ///< at least 1
  std::size_t record_bytes = 0;  ///< at least 1; takes whole blocks of 4096 on disk. 2 to 6 MiB are fastest
  /// Bytes of each record, 1 to record_bytes, where they differ: on disk a record takes no more blocks than it needs, in
  /// memory all take record_bytes. Empty: all have record_bytes.
  std::vector<std::size_t> sizes = {};
  std::string who = {};  ///< in front of errors: "rank 0 optimizer state"
  /// What people call a record, for errors: "layers.3.weight". Called only then. Null: its number is enough.
  std::function<std::string(std::int64_t record)> record_name = nullptr;
  std::vector<StripePath> paths = {};  ///< at least 1, unless all records are resident

  /// Slots of record_bytes each, in memory: the caller's, those being read or waiting for it, those being written.
  int most_held = 1;     ///< at least 1
  int read_ahead = 4;    ///< from 0; each hides the disk's latency once
  int write_behind = 3;  ///< from 0: then `put` waits for its write
  /// As many records as fit here are kept in memory and never read or written: of the first `resident_first` ones, then of the others.
  /// They are spread evenly, so that the disk has something to do while they are used.
  std::size_t resident_bytes = 0;
  std::int64_t resident_first = 0;  ///< 0 to records

  bool verify = false;      ///< a checksum of each record on disk, 8 bytes in memory, looked at when it is read
  bool direct = true;       ///< BlockFileOptions::direct
  bool write_zeros = true;  ///< BlockFileOptions::write_zeros
  IoRingOptions io = {};
  AlignedMemory::Give memory =
      nullptr;  ///< gives memory for records, which a device copies from and to; null: the system
  /// Records are durable (DurableTier): their files have this name in each directory, stay when the process ends, and have two places
  /// for each record. A checksum of each record is looked at when it is read, as with `verify`. Empty: scratch.
  std::string durable = {};
  bool durable_is_there = false;  ///< BlockFileOptions::must_be_there
};

/// Records in scratch files, read ahead and written behind the caller's back; see RecordTier for what it promises.
///
/// **Memory.** The resident records, and `most_held + read_ahead + write_behind` slots. Of the last two, those that nobody writes are read
/// into, `read_ahead` at least (none where that is 0). So there is always a slot for the next `get`.
///
/// **Traversals.** A slot keeps its record until it is needed for another: that of the record which was put or released first, whether or
/// not the disk has it by then. So what is read does not depend on the disk's speed (as long as what is fetched is also got, in that
/// order), and a traversal that
/// begins where the last one ended (forward, then backward) finds the last records in the slots. The resident
/// set needs no such luck: it saves the same reads and writes in any order.
///
/// **A record that is written and wanted again** is not read: its slot still has it. It is given out when the write has
/// ended. So no read of a record is ever in flight beside a write of it.
///
/// **A record that was never put** is zeros, without a read.
///
/// **A copy** reads straight from the disk to where it is wanted, whatever the slots hold; only what is resident, or was
/// never put, needs no read. So what copies read does not depend on what else is done, and they need no slot.
class FileTier final : public RecordTier, public DurableTier {
 public:
  /// Bytes of memory that `create` will take: exact, but for io_uring's rings (some KiB) or the threads' stacks.
  /// Errors: 70 options that make no sense.
  static absl::StatusOr<std::size_t> memory_bytes(const FileTierOptions& options);
  /// Bytes that `create` will take in each of `options.paths`: exact. Errors: 70.
  static absl::StatusOr<std::vector<std::int64_t>> file_bytes(const FileTierOptions& options);
  /// Takes all memory and all room on disk. Errors: 70, those of `BlockFile::create` and `IoRing::make`, 71 no memory.
  static absl::StatusOr<std::unique_ptr<FileTier>> create(const FileTierOptions& options);

  /// Waits for what is being written; a failure is logged. `flush` before, to know of it.
  ~FileTier() override;

  std::int64_t num_records() const override { return options_.records; }
  std::size_t record_bytes() const override { return options_.record_bytes; }
  std::int64_t most_held() const override { return options_.most_held; }
  bool fetch(std::int64_t record) override;
  bool stays_in_memory(std::int64_t record) const override { return resident_.has(record); }
  absl::StatusOr<std::span<std::byte>> get(std::int64_t record) override;
  absl::Status put(std::int64_t record) override;
  absl::Status release(std::int64_t record) override;
  /// Like `get`, for a caller that writes all of the record: nothing is read.
  absl::StatusOr<std::span<std::byte>> get_to_overwrite(std::int64_t record);
  /// Like `put`, but for a record whose latest value has these bytes already: that is left as it is. REQUIRES: checksums.
  absl::Status put_if_changed(std::int64_t record);
  absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) override;
  absl::Status end_copies(std::uint64_t tag) override;
  /// What was fetched and not got stays in memory, but its slots may be used for others.
  absl::Status flush() override;
  TierCounters counters() const override;
  std::size_t record_memory_bytes() const override { return resident_memory_.bytes() + slot_memory_.bytes(); }
  std::size_t allocated_bytes() const override;
  std::string describe() const override;

  /// REQUIRES, as all of DurableTier: FileTierOptions::durable.
  absl::Status end_writes() override;
  absl::Status sync() override;
  std::string where() const override { return two_places_.text(written_, checksums_); }
  void committed() override { two_places_.commit(); }
  absl::Status protect(std::string_view where) override { return two_places_.protect(where); }
  absl::Status return_to(std::string_view where) override;
  std::span<std::byte> in_memory() override { return resident_memory_.span(); }

  /// How many are always in memory.
  std::int64_t resident_records() const { return sizes_.resident; }

 private:
  enum class SlotState : std::uint8_t { kFree, kFetched, kHeld, kWriting };
  /// Memory for one record that is not resident. Whatever its state, `record` is what it holds.
  struct Slot {
    std::int64_t record;  ///< -1: none
    std::uint64_t order;  ///< when it was put or released last: the lowest one is used next
    SlotState state;
    bool reading;     ///< the read has not ended, as far as we know
    bool was_read;    ///< from disk, for a `get` that is still to come
    bool unverified;  ///< was_read, and its checksum has not been looked at
    bool wanted;      ///< kWriting, and fetched meanwhile
  };
  /// A read of a record into memory of the caller.
  struct Copy {
    std::int64_t record;
    std::span<std::byte> memory;  ///< of the record, in whole blocks
    std::uint64_t tag;            ///< the caller's
    std::uint64_t request;        ///< the ring's
    bool ended;
  };
  struct Sizes {
    std::int64_t resident = 0;
    std::int64_t on_disk = 0;  ///< records
    std::size_t slots = 0;
    std::size_t stride_bytes = 0;  ///< of a record in a slot and in a file
    std::vector<std::int64_t> file_records, file_bytes;
  };

  static bool has_checksums(const FileTierOptions& options) { return options.verify || !options.durable.empty(); }
  static EvenSpread spread_of(const FileTierOptions& options, std::int64_t resident) {
    return {options.records, resident, options.resident_first};
  }
  static absl::StatusOr<Sizes> sizes_of(const FileTierOptions& options);
  static std::size_t memory_of(const FileTierOptions& options, const Sizes& sizes);
  FileTier(const FileTierOptions& options, const Sizes& sizes);
  absl::Status take_memory();
  absl::Status take_files();

  std::span<std::byte> memory_of_slot(std::size_t slot) const;
  std::span<std::byte> resident_memory(std::int64_t record) const;
  std::int32_t& slot_of(std::int64_t record) const;
  bool is_on_disk(std::int64_t record) const {
    return record >= 0 && record < options_.records && !resident_.has(record);
  }
  /// Index in the tables of records on disk.
  std::size_t on_disk(std::int64_t record) const { return static_cast<std::size_t>(resident_.index(record)); }
  bool holds(std::int64_t record) const;
  static std::size_t size_of(const FileTierOptions& options, std::int64_t record) {
    return options.sizes.empty() ? options.record_bytes : options.sizes[static_cast<std::size_t>(record)];
  }
  IoRequest request(IoKind kind, std::size_t slot) const;
  IoRequest request_of(std::int64_t record) const;
  absl::Status hand_over(std::int64_t record, const IoRequest& request);
  std::optional<std::size_t> next_slot() const;

  absl::Status start_read(std::size_t slot, std::int64_t record);
  absl::Status end_read(std::size_t slot);
  absl::Status verify(std::size_t slot);
  absl::Status verify(std::int64_t record, std::span<const std::byte> memory);
  absl::Status end_copy(Copy& copy);
  std::uint64_t checksum_of_slot(std::size_t slot) const;
  absl::Status start_write(std::size_t slot, std::optional<std::uint64_t> checksum);
  absl::Status end_write(std::size_t slot);
  absl::Status end_writes_behind();
  absl::Status end_writes_that_are_done();
  absl::StatusOr<std::size_t> take_slot(std::int64_t record);
  void reuse_slot(std::size_t slot, std::int64_t record);
  absl::Status bring_in(std::size_t slot);
  /// `checksum`: of the slot's bytes, where it is known.
  absl::Status let_go(std::int64_t record, bool changed, std::optional<std::uint64_t> checksum = std::nullopt);

  absl::Status wrong_use(const std::string& what);
  absl::Status fail(std::int64_t record, const absl::Status& status);
  std::string name_of(std::int64_t record) const;

  const FileTierOptions options_;
  const Sizes sizes_;
  const EvenSpread resident_;
  AlignedMemory resident_memory_, slot_memory_;
  Table<Slot> slots_;
  // One a record on disk.
  Table<std::int32_t> slot_of_;  ///< its slot + 1; 0: none
  Table<StripePlace> places_;
  Table<std::int64_t> offsets_;                    ///< in its file
  Table<std::uint8_t> written_;                    ///< it was put once
  Table<std::uint64_t> checksums_;                 ///< where has_checksums
  TwoPlaces two_places_;                           ///< where records are durable
  Table<std::uint8_t> resident_held_;              ///< one a resident record
  std::vector<std::unique_ptr<BlockFile>> files_;  ///< one a path; null where a path has no records
  std::unique_ptr<IoRing> ring_;                   ///< behind the memory and files it uses, so that it ends first
  std::vector<Copy> copies_;                       ///< that have not ended, oldest first
  std::uint64_t copies_begun_ = 0;
  int held_ = 0, fetched_ = 0, writing_ = 0;
  std::uint64_t order_ = 0;  ///< the last number given
  TierCounters counters_;    ///< all but wait_seconds
  absl::Status failure_;
  absl::Status sync_failure_;  ///< of a sync on any thread, which the next end_writes is behind
};

}  // namespace tessera
