#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

/// All counts are since the tier was made. A read or write counts when it begins, so counts after a step do not depend on
/// how fast the disk is.
struct TierCounters {
  std::int64_t gets = 0;           ///< records handed out, or copied
  std::int64_t hits = 0;           ///< of those, the ones that needed no read: they were in memory, or still zeros
  std::int64_t reads = 0;          ///< of records from disk
  std::int64_t writes = 0;         ///< of records to disk
  std::int64_t bytes_read = 0;     ///< on disk, where a record takes whole blocks of 4096 bytes
  std::int64_t bytes_written = 0;  ///< likewise
  double wait_seconds = 0;         ///< that the owner stood still for the disk
};

/// Records, numbered from 0, zeros at first: in memory (`host_tier.h`) or in files (`file_tier.h`). What is in
/// a record is the caller's matter. A step over records in files, read ahead:
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
/// 1. One thread uses a tier, its owner: the first one that calls it. Order of records is free.
/// 2. At most `most_held` records are held at once. Within that, no call fails for want of memory.
/// 3. What `put` took is what the next `get` gives, whether or not it has reached the disk by then.
/// 4. The first error ends the tier: it and every later call return it, and nothing is given out as good any more. A
///    write that fails in the background is reported by the next `get`, `put`, `release` or `flush`.
class RecordTier {
 public:
  virtual ~RecordTier() = default;

  virtual std::int64_t num_records() const = 0;
  /// Of the largest record.
  virtual std::size_t record_bytes() const = 0;
  /// Records that may be held at once; the size of `num_records` where there is no limit.
  virtual std::int64_t most_held() const = 0;

  /// Advice that `record` is wanted soon: begins to read it, without waiting. Does nothing if it is in memory. False: there is no room for it
  /// yet, since as many are read ahead as may be, or since what is written holds the memory; later there is. An error shows at the
  /// record's `get`.
  virtual bool fetch(std::int64_t record) = 0;
  /// Whether it is never read. REQUIRES: 0 <= record < num_records.
  virtual bool stays_in_memory(std::int64_t record) const = 0;
  /// The record's memory, as many bytes as it has, held until `put` or `release`. Waits until it is there. A record that is held
  /// already is given again.
  virtual absl::StatusOr<std::span<std::byte>> get(std::int64_t record) = 0;
  /// The caller has changed the record and is done with it. REQUIRES: it is held.
  virtual absl::Status put(std::int64_t record) = 0;
  /// The caller has not changed the record and is done with it; nothing is written. REQUIRES: it is held.
  virtual absl::Status release(std::int64_t record) = 0;
  /// Begins to copy a record's bytes into `memory`, without waiting and without taking memory of the tier. `memory` is as
  /// large as the record in whole blocks of 4096 bytes, begins at a multiple of that, and is the tier's until `end_copies`
  /// of the same tag. A record that is put before has both: the copy has what it held when the copy began. REQUIRES: it is not held.
  virtual absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) = 0;
  /// Waits for all copies of `tag`. Whatever is returned, their memory is the caller's again.
  virtual absl::Status end_copies(std::uint64_t tag) = 0;
  /// Waits until all that was put is written.
  virtual absl::Status flush() = 0;

  virtual TierCounters counters() const = 0;
  /// Bytes of memory that hold records: those that stay, and slots for the others.
  virtual std::size_t record_memory_bytes() const = 0;
  /// Bytes of memory that the tier has taken: that, and tables with some bytes a record.
  virtual std::size_t allocated_bytes() const = 0;
  /// Where the records are, for logs.
  virtual std::string describe() const = 0;
};

}  // namespace tessera
