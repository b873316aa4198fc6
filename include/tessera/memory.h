#pragma once

// See docs/glossary.md: slot, tier, unit.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// The uses of a rank's memory. Everything that Tessera allocates for training state belongs to one of these.
enum class MemoryCategory {
  /// this rank's part of the parameters, in the parameter dtype, and its part of a second copy ("secondary").
  /// Replicated parameters count as a whole. If ranks of a host share one copy, only this rank's share of that copy
  /// counts
  kParameters,
  kSlots,      ///< buffers for gathered units, and a buffer for the quantized values of a rounded second copy
  kGradients,  ///< this rank's part of the reduced gradients, fp32
  kBuckets,    ///< gradients that are not reduced yet, in the reduce dtype (in fp32 if they accumulate unsharded)
  kMasters,    ///< the bits of fp32 master weights that bf16 and fp16 parameters do not hold
  kOptimizer,  ///< optimizer states, such as moments and momentum
  kStaging,    ///< scratch memory of reductions, of exchanged matrices and of outer steps
  /// records of offloaded state, while they are used or are copied to or from their tier; on the CPU also cached
  /// records
  kRecords,
  kCheckpoint,   ///< the copy from which an asynchronous save writes ("checkpoint.async"), in host memory
  kActivations,  ///< saved tensors of forward, while they are copied to and from their tier ("offload.activations"), on
                 ///< the CPU
  kFeedback,     ///< the parts of gradients that compression leaves out ("compression"), and its factors, fp32
  /// host memory of a rank that trains on a GPU. Tier "host": all records, and copies of gradients and parameters if
  /// the CPU makes the updates. Tier "nvme": records that are cached or being copied to or from the disk, parameters
  /// that are being brought for gathers, and slots of activations. "durable": slots of commits.
  /// "sync" asynchronous or backups: this rank's shards, and copies of the GPU's parameters and gradients
  kHostRecords,
};
/// Number of categories.
constexpr std::size_t kMemoryCategories = 12;
/// Returns the name of a category for tables and logs.
std::string name_of(MemoryCategory category);

/// Bytes by category.
struct MemoryUse {
  std::array<std::int64_t, kMemoryCategories> bytes{};  ///< bytes, indexed by MemoryCategory
  /// Returns the bytes of one category.
  std::int64_t& operator[](MemoryCategory c) { return bytes[static_cast<std::size_t>(c)]; }
  /// Returns the bytes of one category.
  std::int64_t operator[](MemoryCategory c) const { return bytes[static_cast<std::size_t>(c)]; }
  /// Returns the sum of all categories, kHostRecords included.
  std::int64_t total() const;
  /// Returns the sum without kHostRecords: the bytes that "memory.limit" limits.
  std::int64_t limited() const;
  friend bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

/// The state that a rank keeps on disk ("offload", "durable"), and the bytes that its steps read and write. Steps go
/// through the state alternately forward and backward, so two steps in a row are counted together. The first two steps
/// differ, since nothing is in memory yet.
struct DiskUse {
  std::int64_t bytes = 0;                 ///< size of the rank's files
  std::int64_t read_in_two_steps = 0;     ///< bytes read in two steps
  std::int64_t written_in_two_steps = 0;  ///< bytes written in two steps
  std::int64_t durable_bytes = 0;         ///< size of the rank's durable files ("durable"), in addition to `bytes`
  std::int64_t written_in_commit = 0;     ///< bytes that a commit writes in addition to those of the step itself
  friend bool operator==(const DiskUse&, const DiskUse&) = default;
};

/// Bytes that a step copies between a GPU and its host.
struct HostStepBytes {
  std::int64_t to_host = 0;  ///< copied from the GPU to its host
  std::int64_t to_gpu = 0;   ///< copied from the host to its GPU
  friend bool operator==(const HostStepBytes&, const HostStepBytes&) = default;
};

/// The exact memory plan of one rank. All ranks have the same plan, since shards have equal sizes. All numbers are
/// bytes.
struct PlannedMemory {
  MemoryUse use;  ///< planned memory by category
  DiskUse disk;   ///< state on disk
  /// bytes of records in host memory that a step copies to the GPU; the same number is copied back
  std::int64_t streamed_bytes = 0;
  /// Bytes that a step copies if the host's CPU instead of the GPU updates the records (OffloadedStep::kCpu). The sums
  /// of gradients are copied to the host, and so are parameters that hold all bits or half of the bits of their
  /// masters. New parameters are copied to the GPU.
  HostStepBytes host_step;
  std::int64_t uploaded_bytes = 0;  ///< bytes of offloaded parameters that a step copies to the GPU for gathers
  HostStepBytes gradients;          ///< bytes of offloaded sums of gradients that a step copies
  /// the plan as text: a table with the bytes and the contents of each category and their total, and sentences about
  /// copies, disk and exchanges
  std::string table;
};

}  // namespace tessera
