#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

/// The notes of all ranks about a unit (unit_notes). The notes come with the sum of the unit's gradients.
struct UnitAgreement {
  // These fields are set if the host has waited for the notes.
  std::span<const char> used;  ///< [trainable parameter of the unit]: whether any rank used the parameter
  double weight = 0.0;         ///< sum of all ranks' weights (Reducer::begin_round)
  std::int64_t samples = 0;    ///< sum of all ranks' samples (Reducer::begin_round)
  bool ranks_agree = true;     ///< whether all ranks of the shard axis gave the same digest (Reducer::begin_round)
  // These fields point to memory of the device and are set if work is queued. The host does not have their values.
  const float* used_there = nullptr;     ///< [trainable parameter of the unit]: above 0 if any rank used the parameter
  const float* weight_there = nullptr;   ///< [1]: sum of all ranks' weights
  const float* samples_there = nullptr;  ///< [1]: sum of all ranks' samples
  const float* differ_there = nullptr;   ///< [digest_bits]: 0 if the ranks agree
  std::size_t digest_bits = 0;
};

}  // namespace tessera
