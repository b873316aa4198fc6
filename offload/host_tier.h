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
  std::size_t record_bytes = 0;  ///< 1 or more
  /// Bytes of each record, 1 to record_bytes, where they differ; each record begins at a multiple of 64. If it is
  /// empty, all have record_bytes.
  std::vector<std::size_t> sizes = {};
  std::string who = {};  ///< text in front of errors
  /// Memory to use: enough for all records, at a multiple of 64; it is zeroed, and must outlive the tier. Empty: the
  /// tier takes its own.
  std::span<std::byte> memory = {};
  /// Function that gives memory that a device copies from and to, if `memory` is empty; null: the system gives the
  /// memory.
  AlignedMemory::Give give = nullptr;
};

/// All records in memory, one behind the other. Nothing is ever read or written, so every `get` is a hit and any number
/// of records may be held. A record stays at its place, so a device may continue to copy a record after it was put.
class HostTier final : public RecordTier {
 public:
  /// Returns the exact number of bytes that `create` will take from the system, including tables with some bytes per
  /// record.
  static std::size_t memory_bytes(const HostTierOptions& options);
  /// Returns the bytes of the records themselves.
  static std::size_t all_bytes(const HostTierOptions& options);
  /// Errors: 70 options that make no sense, 71 no memory.
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
  AlignedMemory held_;           ///< one byte per record: 1 if the caller holds it
  Table<std::uint64_t> begins_;  ///< where each record begins, if sizes differ
  TierCounters counters_;
  absl::Status failure_;
};

}  // namespace tessera
