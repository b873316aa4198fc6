#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// What a rank's memory is for. Everything Tessera allocates for training state belongs to one of these.
enum class MemoryCategory {
  kParameters,  ///< this rank's part of the parameters, in the parameter dtype (all of them where replicated; of a copy
                ///< that ranks share, this rank's share)
  kSlots,       ///< where sharded units are gathered
  kGradients,   ///< reduced gradients, fp32: this rank's part
  kBuckets,     ///< unreduced gradients, in the reduce dtype (fp32 where they accumulate unsharded)
  kMasters,     ///< what parameters that are not fp32 lack of their fp32 master weights
  kOptimizer,   ///< moments, momentum
  kStaging,     ///< scratch of the reducer
  kRecords,  ///< records of what lies below memory, while they are used or on their way there and back; on the CPU cached
             ///< ones too
  kCheckpoint,   ///< the copy that an asynchronous save writes ("checkpoint.async"), in host memory
  kActivations,  ///< what forward saves, on its way to and from its tier ("offload.activations"); of the CPU
  kFeedback,     ///< what rounding took from gradients on the wire ("compression.error_feedback"), fp32
  kHostRecords,  ///< where a GPU trains: memory of its host. All records with tier "host", and what gradients and parameters need
  ///< there if the CPU updates them; with "nvme" those that are on their way to the disk or from it, or cached, parameters on their way
  ///< to gathers, and slots of activations; and slots of commits ("durable")
};
constexpr std::size_t kMemoryCategories = 12;
std::string name_of(MemoryCategory category);

/// Bytes by category.
struct MemoryUse {
  std::array<std::int64_t, kMemoryCategories> bytes{};
  std::int64_t& operator[](MemoryCategory c) { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t operator[](MemoryCategory c) const { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t total() const;
  /// Without kHostRecords: what "memory.limit" is a limit of.
  std::int64_t limited() const;
  friend bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

/// What of a rank's training state lies on disk ("offload"), and what steps move. Steps go through it forward and backward
/// by turns, so two in a row are counted together; the first two differ, since nothing is in memory yet.
struct DiskUse {
  std::int64_t bytes = 0;                 ///< of the rank's files
  std::int64_t read_in_two_steps = 0;     ///< bytes
  std::int64_t written_in_two_steps = 0;  ///< bytes
  std::int64_t durable_bytes = 0;         ///< of the rank's durable files ("durable"), beyond `bytes`
  std::int64_t written_in_commit = 0;     ///< bytes, beyond what the step itself writes
  friend bool operator==(const DiskUse&, const DiskUse&) = default;
};

/// Bytes that a step copies between a GPU and its host.
struct HostStepBytes {
  std::int64_t to_host = 0;
  std::int64_t to_gpu = 0;
  friend bool operator==(const HostStepBytes&, const HostStepBytes&) = default;
};

/// The exact memory plan of one rank (every rank's is equal, since shards are).
struct PlannedMemory {
  MemoryUse use;
  DiskUse disk;
  std::int64_t streamed_bytes = 0;  ///< of records in host memory that a step copies to its GPU; it copies as many back
  /// Where the host's CPU updates them instead (OffloadedStep::kCpu): sums of gradients, and parameters that hold their masters or half
  /// of them, to the host; new parameters to the GPU.
  HostStepBytes host_step;
  std::int64_t uploaded_bytes = 0;  ///< of parameters below a GPU's memory that a step copies there for gathers
  HostStepBytes gradients;          ///< of sums below a GPU's memory that a step copies
  std::string table;  ///< for people: a row a category with its bytes and contents; the total, and 16 bytes a parameter
};

}  // namespace tessera
