#pragma once

// See docs/glossary.md: advice, slot, tier.

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

/// Counts since the tier was made. A read or write is counted when it begins, so the counts after a step do not depend
/// on how fast the disk is.
struct TierCounters {
  std::int64_t gets = 0;           ///< number of records that were returned or copied
  std::int64_t hits = 0;           ///< number of gets without a read, since the record was in memory or had never been
                                   ///< written
  std::int64_t reads = 0;          ///< number of reads of records from disk
  std::int64_t writes = 0;         ///< number of writes of records to disk
  std::int64_t bytes_read = 0;     ///< number of bytes read from disk, where a record occupies whole blocks of 4096
                                   ///< bytes
  std::int64_t bytes_written = 0;  ///< number of bytes written to disk, also in whole blocks
  double wait_seconds = 0;         ///< time for which the owner waited for the disk
};

/// A store of numbered records (I/O blocks), in memory (`host_tier.h`) or in files (`file_tier.h`). Records are zeros
/// at first, and their content belongs to the caller. A step over records in files, with reading ahead, is:
///
///     const std::int64_t count = tier.num_records();
///     for (std::int64_t i = 0, next = 0; i < count; ++i) {
///       while (next < count && tier.fetch(next)) ++next;  // advice: as many as there is room for
///       auto record = tier.get(i);                        // waits for the read
///       update(*record);                                  // in place
///       tier.put(i);                                      // written in the background
///     }
///     tier.flush();
///
/// The states of a record are:
///
/// | state | who may use the record's memory | calls that end the state |
/// |---|---|---|
/// | at rest | the tier | `fetch`, `get` |
/// | fetched | the tier | `get` |
/// | held | the caller | `put`, `release` |
///
/// 1. Only one thread may use a tier: the first thread that calls it. Records may be used in any order.
/// 2. The caller may hold at most `most_held` records at once. Within that limit no call fails for lack of memory.
/// 3. `get` returns the bytes of the last `put`, even if they have not been written to the disk yet.
/// 4. After the first error a tier cannot be used: that call and every later call return the error, and no data. A
///    write that fails in the background is reported by the next `get`, `put`, `release` or `flush`.
class RecordTier {
 public:
  virtual ~RecordTier() = default;

  virtual std::int64_t num_records() const = 0;
  /// Returns the size of the largest record in bytes.
  virtual std::size_t record_bytes() const = 0;
  /// Returns the number of records that may be held at once; `num_records` if there is no limit.
  virtual std::int64_t most_held() const = 0;

  /// Announces that `record` will be needed soon (prefetch): begins to read it, without waiting. It does nothing if the
  /// record is in memory. Returns false if there is no memory for the record yet, because other records are being read
  /// ahead or written; call it again later. If the read fails, `get` of the record returns the error.
  virtual bool fetch(std::int64_t record) = 0;
  /// Returns whether the record always stays in memory, and is never read. REQUIRES: 0 <= record < num_records.
  virtual bool stays_in_memory(std::int64_t record) const = 0;
  /// Returns the record's memory, which is held until `put` or `release`. It waits until the record is in memory. If
  /// the record is already held, it returns the same memory again.
  virtual absl::StatusOr<std::span<std::byte>> get(std::int64_t record) = 0;
  /// Ends the caller's use of a record that the caller has changed. REQUIRES: it is held.
  virtual absl::Status put(std::int64_t record) = 0;
  /// Ends the caller's use of a record that the caller has not changed, so the record is not written. REQUIRES: it is
  /// held.
  virtual absl::Status release(std::int64_t record) = 0;
  /// Begins to copy a record's bytes into `memory`, without using memory of the tier. It waits if the record is being
  /// written. `memory` is as large as the record in whole blocks of 4096 bytes, and begins at a multiple of 4096.
  /// `memory` belongs to the tier until `end_copies` is called with the same tag. The record may be put meanwhile: the
  /// copy has the bytes that the record had when the copy began. REQUIRES: the record is not held.
  virtual absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) = 0;
  /// Waits for all copies with `tag`. Afterwards the memory of these copies belongs to the caller again, also after an
  /// error.
  virtual absl::Status end_copies(std::uint64_t tag) = 0;
  /// Waits until all records that were put are written.
  virtual absl::Status flush() = 0;

  virtual TierCounters counters() const = 0;
  /// Returns the number of bytes of memory for records: for those that always stay in memory, and for the slots of
  /// other records.
  virtual std::size_t record_memory_bytes() const = 0;
  /// Returns the number of bytes that the tier has allocated: record_memory_bytes, and tables with a few bytes for each
  /// record.
  virtual std::size_t allocated_bytes() const = 0;
  /// Returns a text for logs that names the places of the records.
  virtual std::string describe() const = 0;
};

}  // namespace tessera
