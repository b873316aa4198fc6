#pragma once

// See docs/glossary.md: advice, slot, tier.

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

/// Counts since the tier was made. A read or write counts when it begins, so counts after a step do not depend on how
/// fast the disk is.
struct TierCounters {
  std::int64_t gets = 0;           ///< records handed out, or copied
  std::int64_t hits = 0;           ///< number of gets that needed no read: the record was in memory, or still zeros
  std::int64_t reads = 0;          ///< reads of records from disk
  std::int64_t writes = 0;         ///< writes of records to disk
  std::int64_t bytes_read = 0;     ///< bytes on disk, where a record takes whole blocks of 4096 bytes
  std::int64_t bytes_written = 0;  ///< bytes on disk, also in whole blocks
  double wait_seconds = 0;         ///< time for which the owner waited for the disk
};

/// Records (I/O blocks), numbered from 0, zeros at first: in memory (`host_tier.h`) or in files (`file_tier.h`). The
/// content of a record belongs to the caller. This is a step over records in files, read ahead:
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
/// A record is one of
///
/// | state | who may touch its memory | leaves it by |
/// |---|---|---|
/// | at rest | the tier | `fetch`, `get` |
/// | fetched | the tier | `get` |
/// | held | the caller | `put`, `release` |
///
/// 1. One thread uses a tier, its owner: the first one that calls it. Records may be used in any order.
/// 2. The caller holds at most `most_held` records at once. Within that limit no call fails for want of memory.
/// 3. The next `get` returns what `put` took, whether or not it has reached the disk by then.
/// 4. The first error ends the tier: this call and every later one return the error, and no data is given out any more.
///    A write that fails in the background is reported by the next `get`, `put`, `release` or `flush`.
class RecordTier {
 public:
  virtual ~RecordTier() = default;

  virtual std::int64_t num_records() const = 0;
  /// Returns the number of bytes of the largest record.
  virtual std::size_t record_bytes() const = 0;
  /// Returns the number of records that may be held at once; `num_records` where there is no limit.
  virtual std::int64_t most_held() const = 0;

  /// Advises that `record` is wanted soon (prefetch): begins to read it, without waiting. Does nothing if it is in
  /// memory. Returns false if there is no room for it yet, because enough records are being read ahead, or because
  /// records that are being written hold the memory; call again later. If this read fails, the record's `get` returns
  /// the error.
  virtual bool fetch(std::int64_t record) = 0;
  /// Returns whether the record always stays in memory, and is never read. REQUIRES: 0 <= record < num_records.
  virtual bool stays_in_memory(std::int64_t record) const = 0;
  /// Returns the record's memory, which is held until `put` or `release`. It waits until the record is in memory. A
  /// record that is held already is returned again.
  virtual absl::StatusOr<std::span<std::byte>> get(std::int64_t record) = 0;
  /// Says that the caller has changed the record and is done with it. REQUIRES: it is held.
  virtual absl::Status put(std::int64_t record) = 0;
  /// Says that the caller is done with the record and has not changed it, so that nothing is written. REQUIRES: it is
  /// held.
  virtual absl::Status release(std::int64_t record) = 0;
  /// Begins to copy a record's bytes into `memory`, without waiting and without taking memory of the tier. `memory` is
  /// as large as the record in whole blocks of 4096 bytes, begins at a multiple of that, and belongs to the tier until
  /// `end_copies` with the same tag. The record may be put meanwhile: the copy has the bytes that the record held when
  /// the copy began.
  /// REQUIRES: the record is not held.
  virtual absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) = 0;
  /// Waits for all copies with `tag`. Their memory belongs to the caller again, also after an error.
  virtual absl::Status end_copies(std::uint64_t tag) = 0;
  /// Waits until all records that were put are written.
  virtual absl::Status flush() = 0;

  virtual TierCounters counters() const = 0;
  /// Returns the bytes of memory that hold records: those of records that always stay in memory, and those of slots for
  /// other records.
  virtual std::size_t record_memory_bytes() const = 0;
  /// Returns the bytes of memory that the tier has taken: record_memory_bytes, and tables with some bytes per record.
  virtual std::size_t allocated_bytes() const = 0;
  /// Says where the records are, for logs.
  virtual std::string describe() const = 0;
};

}  // namespace tessera
