#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sharding/unit.h"

namespace tessera {

/// The values that are hashed.
enum class HashedKind : std::uint64_t {
  kGradients = 1,  ///< a step's sums of gradients, as `FlatGroup::gradient` has them
  kMasters = 2,    ///< the fp32 values that the optimizer updates, from which parameters are rounded
};

/// Returns the hash of a run of a parameter's elements. It is a sum over the elements, modulo 2^64, of mix(kind,
/// parameter, element, bits). So the hashes of runs add up to the hash of the whole parameter, however the parameter is
/// cut into shards. `number`: FlatParameter::number. `first`: index of the run's first element in the parameter, in
/// memory order. All NaN count as equal: their bits depend on which operand a processor took them from.
std::uint64_t hash_of_run(HashedKind kind, std::int64_t number, std::int64_t first, std::span<const float> values);

/// Adds the hash of this rank's part of each unit's gradients to `hashes` [unit]. Padding is not hashed. The function
/// reads the gradients once. REQUIRES: the sums of gradients are complete, on the CPU, and not yet used for an update.
void add_gradient_hashes(const std::vector<std::unique_ptr<Unit>>& units, std::span<std::uint64_t> hashes);

/// Adds hashes of the masters in this rank's optimizer part. It reads masters wherever they lie, and also the optimizer
/// states that share records with masters. Throws the errors of for_each_state.
void add_master_hashes(const std::vector<std::unique_ptr<Unit>>& units, std::span<std::uint64_t> hashes);

}  // namespace tessera
