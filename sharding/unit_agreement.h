#pragma once

#include <cstddef>
#include <span>

namespace tessera {

/// What ranks told each other of a unit with the sum of its gradients (unit_notes).
struct UnitAgreement {
  // Where the host has waited for it.
  std::span<const char> used;  ///< [trainable parameter of the unit]: whether any rank used it
  double weight = 0.0;         ///< sum of all ranks' (Reducer::begin_round)
  bool ranks_agree = true;     ///< all ranks of the shard axis gave the same digest (Reducer::begin_round)
  // Where work is queued, on the device; the host does not know it.
  const float* used_there = nullptr;    ///< the same: above 0 where any rank did
  const float* weight_there = nullptr;  ///< [1]: the same
  const float* differ_there = nullptr;  ///< [digest_bits]: 0 where the ranks agree
  std::size_t digest_bits = 0;
};

}  // namespace tessera
