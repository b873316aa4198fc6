#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>

#include "engine/checkpoint/stored_states.h"
#include "engine/memory/state_views.h"
#include "engine/parameters/parameter_checks.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "sharding/value_hash.h"

namespace tessera {
namespace {

/// The number of hashes for each parameter: one is of its values, the other of its masters and optimizer states.
constexpr std::size_t kKinds = 2;
using Hashes = std::array<std::uint64_t, kKinds>;
constexpr const char* kNames[kKinds] = {"values", "master or optimizer state"};

std::uint64_t hash_of_values_of(const FlatGroup& group, std::size_t i) {
  ValueHash hash;
  const Extent part = intersect(group.layout.extent(i), group.parameter_part);
  if (part.numel <= 0) return hash.value();
  for_each_state(group, StateKind::kParameters, part, StateUse::kRead, [&](const StateView& view) {
    hash.add(view.parameter_place, view.parameter, view.run.numel * group.element_bytes());
  });
  return hash.value();
}

std::uint64_t hash_of_state_of(const FlatGroup& group, std::size_t i) {
  ValueHash hash;
  for_each_tensor_state(group, i, [&](const TensorState&, Extent place) {
    const Extent own = intersect(place, group.of_tensors.part);
    if (own.numel == 0) return;
    visit_tensor_states(group, StateUse::kRead, [&](const TensorStatesView& view) {
      hash.add(view.place, view.at(own.offset), own.numel * 4);
    });
  });
  const Extent part = group.trainable ? intersect(group.layout.extent(i), group.optimizer_part) : Extent{};
  if (part.numel <= 0) return hash.value();
  for_each_state(group, StateKind::kMastersAndStates, part, StateUse::kRead, [&](const StateView& view) {
    const std::int64_t numel = view.run.numel;
    if (view.low) hash.add(view.masters_place, view.low, numel * 2);
    if (view.master && group.dtype != DType::kF32) hash.add(view.masters_place, view.master, numel * 4);
    for (std::size_t state = 0; state < group.records.state().states.size(); ++state) {
      const StateBytes bytes = bytes_of_state(group, state, numel);
      hash.add(view.states_place, view.state[state].data, bytes.data);
      if (bytes.scales > 0) hash.add(view.states_place, view.state[state].scales, bytes.scales);
    }
  });
  return hash.value();
}

/// Returns the number of the part that a rank holds; ranks that hold the same part have the same number.
int part_of_rank(AxisPlacement axes, const MeshPosition& mesh) {
  return (axes.replicate ? mesh.replicate_index : 0) * mesh.shard_size + (axes.shard ? mesh.shard_index : 0);
}

/// The hashes of every rank: those of each parameter, or those of all parameters together.
class Comparison {
 public:
  Comparison(const MemoryPlan& plan, Collectives& control, std::span<const Hashes> own)
      : plan_(plan), count_(own.size()), all_(own.size() * static_cast<std::size_t>(control.size())) {
    throw_if_error(control.all_gather("compare replicas", own.data(), all_.data(), own.size_bytes()).wait());
  }

  /// Returns the ranks whose hash number `i` differs from the hash of most ranks with the same part. Returns all ranks
  /// with that part if no hash has a majority.
  std::vector<int> odd_ranks(std::size_t i, std::size_t kind) const {
    std::map<int, std::map<std::uint64_t, std::vector<int>>> parts;
    const Placement& placement = plan_.placement();
    const std::size_t ranks = all_.size() / count_;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto number = static_cast<int>(rank);
      const int part =
          part_of_rank(kind == 0 ? placement.parameters : placement.optimizer, plan_.placement().mesh.of(number));
      parts[part][all_[rank * count_ + i][kind]].push_back(number);
    }
    std::vector<int> odd;
    for (const auto& [part, hashes] : parts) {
      if (hashes.size() == 1) continue;
      std::size_t most = 0, holders = 0;
      for (const auto& [hash, members] : hashes) most = std::max(most, members.size());
      for (const auto& [hash, members] : hashes) holders += members.size();
      for (const auto& [hash, members] : hashes) {
        if (members.size() == most && 2 * most > holders) continue;
        odd.insert(odd.end(), members.begin(), members.end());
      }
    }
    std::ranges::sort(odd);
    return odd;
  }

 private:
  const MemoryPlan& plan_;
  const std::size_t count_;
  std::vector<Hashes> all_;  ///< [rank][i]: the rank's hash number i
};

}  // namespace

void expect_equal_replicas(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                           Collectives& control, std::int64_t step) {
  std::vector<Hashes> own;
  std::vector<std::string> names;
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    own.push_back({hash_of_values_of(group, i), hash_of_state_of(group, i)});
    names.push_back(group.parameters[i].name);
  });
  if (own.empty()) return;
  // Ranks first compare hashes over all parameters together. Only if these hashes differ, ranks compare the hashes of
  // each parameter.
  Hashes together{};
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    ValueHash hash;
    for (const Hashes& each : own) hash.add(std::as_bytes(std::span(&each[kind], 1)));
    together[kind] = hash.value();
  }
  const Comparison digests(plan, control, {&together, 1});
  if (digests.odd_ranks(0, 0).empty() && digests.odd_ranks(0, 1).empty()) return;
  const Comparison each(plan, control, own);
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      const std::vector<int> odd = each.odd_ranks(i, kind);
      if (odd.empty()) continue;
      throw Error(
          ExitCode::kCorruptData,
          c10::str(
              "after step ", step, " ranks that hold the ", kNames[kind], " of parameter ", names[i],
              " alike differ: ", odd.size() == 1 ? "rank " : "ranks ", number_ranges(odd),
              ". [T0260] hint: look for code that writes parameters on one rank only (check.values finds it); "
              "where there is none, a machine's memory or processor is broken: go on from a checkpoint without it"));
    }
  }
}

}  // namespace tessera
