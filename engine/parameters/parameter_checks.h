#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "sharding/whole_tensors.h"

namespace tessera {

/// Throws tessera::Error (64), with both names, if two tensors among the parameters and `whole` share memory and one of
/// them trains. An Engine gives each parameter new memory, so the other tensor would no longer change with the
/// parameter. The Engine calls this function before it gives parameters memory. Tensors whose elements alternate in
/// memory are not compared.
void expect_own_memory(const std::vector<std::unique_ptr<Unit>>& units, const NamedTensors& whole);

/// Notices changes of an Engine's parameters that the Engine cannot follow. All strategies have the same checks:
///
/// 1. A parameter left its flat buffer (torch::load, Module::to, set_data, share_memory): operators would read one
///    memory, and the Engine would update another.
/// 2. A parameter was written in place outside of Gathered(kWrite). If ranks of a host share one copy, all of them
///    would write it; if the parameter is sharded, the write would be lost. The tensor's version shows such a write.
///    While an Engine has the parameter, its aliases share that version (share_version_with_aliases). Writes through a
///    raw pointer do not change the version; guards that only read notice them by a hash (engine/gathered.cc).
/// 3. A parameter was frozen when the Engine was made, and requires gradients now: there is no memory for its gradient.
/// 4. This rank's part of a parameter was written in any way. Only `"check.values"` checks this.
///
/// The Engine makes these checks at each backward and step. A check costs a few loads for each parameter; a check of
/// values reads this rank's parts of all parameters.
class ParameterChecks {
 public:
  /// `device`: the device on which the parameters lie.
  ParameterChecks(const std::vector<std::unique_ptr<Unit>>& units, bool checks_values, c10::Device device);

  /// Accepts the present parameters. Later checks compare with them.
  void accept();
  void accept(Unit& unit);
  /// Throws tessera::Error (64), which names the first parameter with one of the four changes above. If `may_unfreeze`,
  /// the third change is allowed, because the call that follows allocates memory for the gradient.
  void expect_accepted(bool may_unfreeze) const;

 private:
  const std::vector<std::unique_ptr<Unit>>& units_;
  const bool checks_values_;
  const c10::Device device_;
};

/// Compares the state that must be equal on several ranks, by two hashes for each parameter: one of its values, and one
/// of its masters and optimizer states. The Engine calls it after every `check.replica_hash_every` steps; it is
/// collective over `control`, which has all ranks. It reads all state. Throws tessera::Error (65), the same on every
/// rank, where ranks differ. The error names the first parameter that differs, and the ranks whose hash differs from
/// the hash of most ranks with the same part of the parameter. If no hash has a majority, the error names all ranks
/// with that part.
void expect_equal_replicas(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                           Collectives& control, std::int64_t step);

}  // namespace tessera
