#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"
#include "optim/arithmetic/noise_rule.h"
#include "optim/arithmetic/step_decision.h"

namespace tessera {

// In each step every rank sends one message, and all ranks read all messages (StepAgreement). These functions say how a
// message is laid out and read. CpuStep's messages lie on the host. If a GPU trains, they lie in its memory, where the
// device writes its part of them, and its kernels read them (optim/cuda/device_step.cu).

/// The header of a message.
struct StepMessageHeader {
  double loss = 0.0;    ///< LocalStep::loss; a GPU writes this field, and the host writes all others
  double weight = 0.0;  ///< sum of the weights of this rank's microbatches
  std::int64_t tokens = 0, samples = 0;
  std::int64_t finite = 1;    ///< 0: a sum of squares is infinite or NaN. A GPU leaves it 1 and reads the sums alone
  std::uint64_t gathers = 0;  ///< digest of the order in which units were gathered
  std::uint64_t numbers = 0;  ///< digest of rates and options (digest_of_numbers)
  double busy_seconds = 0.0;  ///< LocalStep::busy_seconds
};

/// The messages of all ranks, and the offsets of the parts of each, in bytes. A header is followed by a flag for each
/// parameter: whether this rank gave it a gradient. The other parts follow, each aligned to 8 bytes.
struct StepMessages {
  const std::byte* of_all = nullptr;  ///< `bytes` for each rank; written for each step
  std::size_t bytes = 0;
  std::size_t sums_offset = 0;    ///< the norm's sums over this rank's parts
  std::size_t losses_offset = 0;  ///< under "reproducible": the MicrobatchLoss of each of this rank's microbatches
  std::size_t own_offset = 0;     ///< with "noise_scale": OwnGradients; 0: messages have none

  /// Sets the offsets and `bytes`, from the numbers of parameters, of losses and of sums.
  void lay_out(std::size_t parameters, std::size_t losses, bool has_own, std::size_t sums) {
    const std::size_t after_flags = (sizeof(StepMessageHeader) + parameters + 7) / 8 * 8;
    own_offset = has_own ? after_flags : 0;
    losses_offset = after_flags + (has_own ? sizeof(OwnGradients) : 0);
    sums_offset = losses_offset + losses * sizeof(MicrobatchLoss);
    bytes = sums_offset + sums * sizeof(double);
  }
};

/// Returns the part at `offset` of a rank's message.
template <class T>
TESSERA_ALWAYS_INLINE const T* part_of_message(const StepMessages& m, int rank, std::size_t offset) {
  return reinterpret_cast<const T*>(m.of_all + m.bytes * static_cast<std::size_t>(rank) + offset);
}

TESSERA_ALWAYS_INLINE const StepMessageHeader& header_of_message(const StepMessages& m, int rank) {
  return *part_of_message<StepMessageHeader>(m, rank, 0);
}

/// Returns whether any of the first `ranks` ranks gave the parameter a gradient.
TESSERA_ALWAYS_INLINE bool is_used_by_any(const StepMessages& m, int ranks, std::size_t parameter) {
  unsigned used = 0;
  for (int rank = 0; rank < ranks; ++rank)
    used |= part_of_message<std::uint8_t>(m, rank, sizeof(StepMessageHeader))[parameter];
  return used != 0;
}

/// Adds the numbers of a rank's message to the sums over ranks. `ranks` is the number of all ranks. Call it in the
/// order of ranks.
TESSERA_ALWAYS_INLINE void add_message(const StepMessages& m, int rank, int ranks, AgreedSums& sums,
                                       OwnGradients& own) {
  add_rank(sums, header_of_message(m, rank), ranks);
  if (m.own_offset == 0) return;
  const OwnGradients& more = *part_of_message<OwnGradients>(m, rank, m.own_offset);
  own.squares += more.squares;
  own.weights += more.weights;
  own.weight_squares += more.weight_squares;
}

}  // namespace tessera
