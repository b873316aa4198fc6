#include "sharding/layout/plan/tier_choice.h"

#include <initializer_list>
#include <utility>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera {
namespace {

constexpr int kSteps = 256;

bool fits(const PlanInput& input, std::int64_t limit) { return MemoryPlan(input).use().limited() <= limit; }

/// Offloads to `below` the smallest fraction of `states` (members of `input`) with which the plan fits, or all of them
/// if no fraction is enough.
void choose(PlanInput& input, std::initializer_list<OffloadedState*> states, std::int64_t limit, Tier below) {
  const auto set = [&](Tier tier, int share) {
    for (OffloadedState* state : states) *state = {tier, static_cast<double>(share) / kSteps};
  };
  set(Tier::kMemory, kSteps);
  if (fits(input, limit)) return;
  int too_little = 0, enough = kSteps;
  while (enough - too_little > 1) {
    const int middle = (too_little + enough) / 2;
    set(below, middle);
    (fits(input, limit) ? enough : too_little) = middle;
  }
  set(below, enough);
}

}  // namespace

Tier tier_below(const OffloadConfig& offload, bool is_gpu) {
  return is_gpu && offload.paths.empty() ? Tier::kHost : Tier::kNvme;
}

PlanInput with_tiers_chosen(PlanInput input, std::int64_t limit, Tier below) {
  OffloadedState& masters = input.tiers.masters;
  OffloadedState& moments = input.tiers.moments;
  OffloadedState& parameters = input.tiers.parameters;
  // A state whose tier is chosen later is at first counted as in memory.
  const auto is_open = [](OffloadedState& state) {
    return std::exchange(state.tier, state.tier == Tier::kAuto ? Tier::kMemory : state.tier) == Tier::kAuto;
  };
  const bool chooses_moments = is_open(moments), chooses_masters = is_open(masters),
             chooses_parameters = is_open(parameters);
  if (below == Tier::kHost && chooses_masters && chooses_moments) {
    choose(input, {&masters, &moments}, limit, below);
  } else {
    if (chooses_moments) choose(input, {&moments}, limit, below);
    if (chooses_masters) choose(input, {&masters}, limit, below);
  }
  if (chooses_parameters) choose(input, {&parameters}, limit, below);
  return input;
}

}  // namespace tessera
