#pragma once

// See docs/glossary.md: tier.

#include <memory>
#include <vector>

#include "offload/files/aligned_memory.h"
#include "offload/table.h"
#include "offload/tier.h"

namespace tessera {

/// The options of a HostTier.
struct HostTierOptions {
  std::int64_t records = 0;      ///< number of records, 1 or more
  std::size_t record_bytes = 0;  ///< size of a record in bytes, 1 or more
  /// The size of each record in bytes, 1 to record_bytes, if the sizes differ; each record begins at a multiple of 64.
  /// If the list is empty, each record has record_bytes bytes.
  std::vector<std::size_t> sizes = {};
  std::string who = {};  ///< text at the beginning of error messages
  /// The memory for all records. It begins at a multiple of 64, must outlive the tier, and is zeroed by the tier. If it
  /// is empty, the tier allocates memory.
  std::span<std::byte> memory = {};
  /// Function that allocates the memory, if a device copies from and to this memory. It is used if `memory` is empty.
  /// If it is null, the system allocates the memory.
  AlignedMemory::Give give = nullptr;
};

/// A tier with all records in memory, one after another. No record is ever read from or written to a disk, so every
/// `get` is a hit, and any number of records may be held. The address of a record never changes, so a device may
/// continue to copy a record after the record was put.
class HostTier final : public RecordTier {
 public:
  /// Returns the exact number of bytes that `create` will allocate from the system, including tables with a few bytes
  /// for each record.
  static std::size_t memory_bytes(const HostTierOptions& options);
  /// Returns the number of bytes of all records, without tables.
  static std::size_t all_bytes(const HostTierOptions& options);
  /// Errors: 70 if options are invalid, 71 if there is not enough memory.
  static absl::StatusOr<std::unique_ptr<HostTier>> create(const HostTierOptions& options);

  std::int64_t num_records() const override { return options_.records; }
  std::size_t record_bytes() const override { return options_.record_bytes; }
  std::int64_t most_held() const override { return options_.records; }
  bool fetch(std::int64_t) override { return true; }
  bool stays_in_memory(std::int64_t) const override { return true; }
  absl::StatusOr<std::span<std::byte>> get(std::int64_t record) override;
  absl::Status put(std::int64_t record) override;
  absl::Status release(std::int64_t record) override { return put(record); }
  absl::Status start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) override;
  absl::Status end_copies(std::uint64_t) override { return failure_; }
  absl::Status flush() override { return failure_; }
  TierCounters counters() const override { return counters_; }
  std::size_t record_memory_bytes() const override { return records_.size(); }
  std::size_t allocated_bytes() const override;
  std::string describe() const override;

 private:
  explicit HostTier(const HostTierOptions& options) : options_(options) {}
  absl::Status fail(std::string what);
  std::span<std::byte> memory_of(std::int64_t record) const;

  const HostTierOptions options_;
  AlignedMemory memory_;
  std::span<std::byte> records_;
  AlignedMemory held_;           ///< one byte for each record: 1 if the caller holds the record
  Table<std::uint64_t> begins_;  ///< offset of each record, if sizes differ
  TierCounters counters_;
  absl::Status failure_;
};

}  // namespace tessera
