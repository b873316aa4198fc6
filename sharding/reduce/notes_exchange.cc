#include "sharding/reduce/notes_exchange.h"

#include <cmath>
#include <cstddef>

#include "runtime/border/throw.h"
#include "sharding/gather/unit_notes.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {

void NotesExchange::start(const ReducedUnit& unit, Notes& notes, Waits waits) const {
  notes.used.clear();
  for (const auto& group : unit.unit->groups) {
    if (!group->trainable) continue;
    for (std::size_t i = 0; i < group->parameters.size(); ++i) {
      notes.used.push_back(unit.gradients.used(*group, i) ? 1 : 0);
    }
  }
  write(notes);
  if (setup_.mesh().world_size() == 1) return;
  float* const values = notes.values.data();
  notes.work = setup_.axes.reduce->all_reduce(unit.unit->name, values, DType::kF32, values, notes.values.size(), waits);
}

void NotesExchange::write(const Notes& notes) const {
  if (!setup_.device.is_queued) return unit_notes::write(notes.values, notes.used, digest_, weight_, samples_);
  std::vector<float> values(notes.values.size());
  unit_notes::write(values, notes.used, digest_, weight_, samples_);
  const Unrecorded unrecorded;
  const auto numel = static_cast<std::int64_t>(values.size());
  const at::Tensor there = flat_view(notes.values.data(), DType::kF32, numel, setup_.device.device);
  // LibTorch copies `values` first, so the vector may be destroyed before the copy to the GPU.
  there.copy_(flat_view(values.data(), DType::kF32, numel, at::kCPU), /*non_blocking=*/true);
}

/// Completes the exchange of notes. Replicas may gather units in different orders, so digests are compared before the
/// notes of replicas are added up.
UnitAgreement NotesExchange::end(const std::string& unit, Notes& notes) const {
  const MeshPosition& mesh = setup_.mesh();
  const auto parameters = static_cast<std::int64_t>(notes.used.size());
  float* const values = notes.values.data();
  throw_if_error(notes.work.wait());
  UnitAgreement agreed;
  if (setup_.device.is_queued) {
    const Unrecorded unrecorded;
    unit_notes::compare_digests(
        flat_view(values + parameters, DType::kF32, MemoryPlan::kDigestBits, setup_.device.device), mesh.shard_size);
  } else {
    agreed.ranks_agree = unit_notes::have_one_digest(notes.values, parameters, mesh.shard_size);
  }
  if (mesh.replicate_size > 1) {
    throw_if_error(setup_.axes.replicate->all_reduce(unit, values, DType::kF32, values, notes.values.size()).wait());
  }
  if (setup_.device.is_queued) {
    agreed.used_there = values;
    agreed.weight_there = values + unit_notes::place_of_weight(parameters);
    agreed.samples_there = values + unit_notes::place_of_samples(parameters);
    agreed.differ_there = values + parameters;
    agreed.digest_bits = MemoryPlan::kDigestBits;
    return agreed;
  }
  unit_notes::read_used(notes.values, notes.used);
  agreed.used = notes.used;
  agreed.weight = notes.values[static_cast<std::size_t>(unit_notes::place_of_weight(parameters))];
  agreed.samples = std::llround(notes.values[static_cast<std::size_t>(unit_notes::place_of_samples(parameters))]);
  return agreed;
}

}  // namespace tessera
