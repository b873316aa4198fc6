#pragma once

// See docs/glossary.md: slot, tier, unit.

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

/// A directory for some of the records; each directory should be on a separate disk.
struct StripePath {
  std::string directory;
  double weight = 1.0;  ///< weight of the directory's share of the records: the bandwidth of its disk, in any unit
};

/// The options of a FileTier; `check_options` in file_tier_sizes.cc refuses invalid options with error 70.
struct FileTierOptions {
  std::int64_t records = 0;  ///< number of records, 1 or more
  /// bytes of a record, 1 or more; on disk a record takes whole blocks of 4096 bytes. Records of 2 to 6 MiB are fastest
  std::size_t record_bytes = 0;
  /// Bytes of each record, 1 to record_bytes, if records have different sizes. On disk a record takes only the blocks
  /// that it needs, but in memory it takes record_bytes. If the list is empty, all records have record_bytes.
  std::vector<std::size_t> sizes = {};
  std::string who = {};  ///< beginning of error messages, such as "rank 0 optimizer state"
  /// Returns the name of a record for errors, such as "layers.3.weight". It is called only for an error. If it is null,
  /// errors have only the record's number.
  std::function<std::string(std::int64_t record)> record_name = nullptr;
  std::vector<StripePath> paths = {};  ///< one directory or more, unless all records are resident

  /// Numbers of slots in memory, each of record_bytes: for records that the caller holds, for records that are read
  /// ahead, and for records that are being written.
  int most_held = 1;     ///< 1 or more
  int read_ahead = 4;    ///< 0 or more; each record that is read ahead hides the latency of one read
  int write_behind = 3;  ///< 0 or more; if it is 0, `put` waits for its write
  /// Bytes of memory for records that always stay in memory and are never on disk. As many records are chosen as fit
  /// into these bytes: first among the first `resident_first` records, then among the others. The chosen records are
  /// spread evenly, so that the disk works on other records while the program uses them.
  std::size_t resident_bytes = 0;
  std::int64_t resident_first = 0;  ///< number of records at the start that are chosen first; 0 to records

  /// Whether a checksum of each record on disk, of 8 bytes, is kept in memory and compared when the record is read.
  bool verify = false;
  bool direct = true;       ///< BlockFileOptions::direct
  bool write_zeros = true;  ///< BlockFileOptions::write_zeros
  IoRingOptions io = {};
  /// Function that allocates the memory for records, if a device copies from and to this memory. If it is null, the
  /// system allocates the memory.
  AlignedMemory::Give memory = nullptr;
  /// The name of the files in each directory, if records are durable (DurableTier). These files stay when the process
  /// ends, and have two positions for each record. Checksums are compared as with `verify`. If the name is empty, the
  /// files are scratch files.
  std::string durable = {};
  bool durable_is_there = false;  ///< BlockFileOptions::must_be_there
};

/// Records in scratch files, which are read ahead and written in the background. The description of RecordTier says
/// what callers can rely on, and which threads may call.
///
/// **Memory.** A FileTier needs memory for the resident records, and `most_held + read_ahead + write_behind` slots.
/// Slots for reading ahead and for writing are shared. Records are read into slots that are not being written; at least
/// `read_ahead` slots are available for this (none if `read_ahead` is 0). So there is always a slot for the next `get`.
///
/// **Traversals.** A slot keeps its record until the slot is needed for another record. The slot whose record was put
/// or released first is reused first, whether or not that record has already been written to disk. So the records that
/// must be read do not depend on the disk's speed (if all fetched records are also got, in the same order). If a
/// traversal begins where the previous traversal ended (forward, then backward), the records that were used last are
/// still in the slots. The number of reads and writes that the resident records save does not depend on the order of a
/// traversal.
///
/// **A record that is needed again while it is being written** is not read, because its slot still has it. The caller
/// gets the record when the write has ended. So there is never a read and a write of the same record at the same time.
///
/// **A record that was never put** has zeros, and is not read from disk.
///
/// **A copy** is read directly from the disk into the caller's memory, whatever records the slots have. Only records
/// that are resident, or were never put, need no read. So the reads of copies do not depend on other calls, and copies
/// need no slot.
class FileTier final : public RecordTier, public DurableTier {
 public:
  /// Returns the bytes of memory that `create` will take: exact, except for io_uring's rings (some KiB) or the threads'
  /// stacks. Errors: 70 if options are invalid.
  static absl::StatusOr<std::size_t> memory_bytes(const FileTierOptions& options);
  /// Returns the exact number of bytes that `create` will take in each of `options.paths`. Errors: 70 if options are
  /// invalid.
  static absl::StatusOr<std::vector<std::int64_t>> file_bytes(const FileTierOptions& options);
  /// Takes all memory and all space on disk. Errors: 70 if options are invalid; those of `BlockFile::create` and
  /// `IoRing::make`; 71 if there is not enough memory.
  static absl::StatusOr<std::unique_ptr<FileTier>> create(const FileTierOptions& options);

  /// Waits for the writes that are under way; a failed write is logged. Call `flush` before, to get the failure.
  ~FileTier() override;

  std::int64_t num_records() const override { return options_.records; }
  std::size_t record_bytes() const override { return options_.record_bytes; }
  std::int64_t most_held() const override { return options_.most_held; }
  bool fetch(std::int64_t record) override;
  bool stays_in_memory(std::int64_t record) const override { return resident_.has(record); }
  absl::StatusOr<std::span<std::byte>> get(std::int64_t record) override;
  absl::Status put(std::int64_t record) override;
  absl::Status release(std::int64_t record) override;
  /// Returns the record's memory to a caller that writes all of it, so nothing is read.
  absl::StatusOr<std::span<std::byte>> get_to_overwrite(std::int64_t record);
  /// Works like `put`, but does not write if the record's latest value has the same bytes. REQUIRES: the tier keeps
  /// checksums.
  absl::Status put_if_changed(std::int64_t record);
  absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) override;
  absl::Status end_copies(std::uint64_t tag) override;
  /// Records for which `fetch` was called, but not `get`, stay in memory. Their slots may then be used for other
  /// records.
  absl::Status flush() override;
  TierCounters counters() const override;
  std::size_t record_memory_bytes() const override { return resident_memory_.bytes() + slot_memory_.bytes(); }
  std::size_t allocated_bytes() const override;
  std::string describe() const override;

  /// REQUIRES: FileTierOptions::durable, as for all functions of DurableTier.
  absl::Status end_writes() override;
  absl::Status sync() override;
  std::string where() const override { return disk_.two_places.text(disk_.written, disk_.checksums); }
  void committed() override { disk_.two_places.commit(); }
  absl::Status protect(std::string_view where) override { return disk_.two_places.protect(where); }
  absl::Status return_to(std::string_view where) override;
  std::span<std::byte> in_memory() override { return resident_memory_.span(); }

  /// Returns the number of records that are always in memory.
  std::int64_t resident_records() const { return sizes_.resident; }

 private:
  enum class SlotState : std::uint8_t { kFree, kFetched, kHeld, kWriting };
  /// Memory for one record that is not resident.
  struct Slot {
    std::int64_t record;  ///< record in the slot, in any state; -1: none
    std::uint64_t order;  ///< number in the order of puts and releases; the slot with the lowest number is used next
    SlotState state;
    bool reading;     ///< whether its read may still be under way
    bool was_read;    ///< whether its record was read from disk for a later `get`
    bool unverified;  ///< whether its record was read, but its checksum was not compared yet
    bool wanted;      ///< whether the record of a slot in kWriting was fetched meanwhile
  };
  /// A read of a record into memory of the caller.
  struct Copy {
    std::int64_t record;
    std::span<std::byte> memory;  ///< memory into which the record is read; it has the record's size in whole blocks
    std::uint64_t tag;            ///< the caller's tag
    std::uint64_t request;        ///< number of the request in the ring
    bool ended;
  };
  struct Sizes {
    std::int64_t resident = 0;
    std::int64_t on_disk = 0;  ///< number of records on disk
    std::size_t slots = 0;
    std::size_t stride_bytes = 0;  ///< bytes of a record in a slot
    std::vector<std::int64_t> file_records, file_bytes;
  };

  /// Tables with one entry for each record on disk.
  struct RecordsOnDisk {
    Table<std::int32_t> slot_of;  ///< number of the record's slot, plus 1; 0: no slot
    Table<StripePlace> places;
    Table<std::int64_t> offsets;     ///< offset of the record in its file
    Table<std::uint8_t> written;     ///< whether the record was ever put
    Table<std::uint64_t> checksums;  ///< used if has_checksums
    TwoPlaces two_places;            ///< used if records are durable
  };

  static bool has_checksums(const FileTierOptions& options) { return options.verify || !options.durable.empty(); }
  static EvenSpread spread_of(const FileTierOptions& options, std::int64_t resident) {
    return {options.records, resident, options.resident_first};
  }
  static std::size_t as_size(std::int64_t value) { return static_cast<std::size_t>(value); }
  static std::vector<double> weights_of(const FileTierOptions& options);
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
  /// Returns the record's index in the tables of RecordsOnDisk, which do not include resident records.
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
  /// `checksum`: the checksum of the slot's bytes, if it is known.
  absl::Status let_go(std::int64_t record, bool changed, std::optional<std::uint64_t> checksum = std::nullopt);

  absl::Status wrong_use(const std::string& what);
  absl::Status fail(std::int64_t record, const absl::Status& status);
  std::string name_of(std::int64_t record) const;

  const FileTierOptions options_;
  const Sizes sizes_;
  const EvenSpread resident_;
  AlignedMemory resident_memory_, slot_memory_;
  Table<Slot> slots_;
  RecordsOnDisk disk_;
  Table<std::uint8_t> resident_held_;              ///< whether each resident record is held
  std::vector<std::unique_ptr<BlockFile>> files_;  ///< one file for each path; null if a path has no records
  /// declared behind the memory and files that it uses, so that it is destroyed first
  std::unique_ptr<IoRing> ring_;
  std::vector<Copy> copies_;  ///< copies that have not ended, oldest first
  std::uint64_t copies_begun_ = 0;
  int held_ = 0, fetched_ = 0, writing_ = 0;
  std::uint64_t order_ = 0;  ///< the order number that was given last
  TierCounters counters_;    ///< all counters except wait_seconds, which is added when they are read
  absl::Status failure_;
  absl::Status sync_failure_;  ///< failure of a sync on any thread; the next end_writes returns it
};

}  // namespace tessera
