#include "sharding/layout/tier_choice.h"

#include <utility>

namespace tessera {
namespace {

constexpr int kSteps = 256;

bool fits(const PlanInput& input, std::int64_t limit) { return MemoryPlan(input).use().limited() <= limit; }

/// The least share of `state` on disk with which the plan fits; all of it if none is enough.
void choose(PlanInput& input, OffloadedState& state, std::int64_t limit) {
  state = {Tier::kMemory, 1.0};
  if (fits(input, limit)) return;
  state.tier = Tier::kNvme;
  int too_little = 0, enough = kSteps;
  while (enough - too_little > 1) {
    const int middle = (too_little + enough) / 2;
    state.fraction = static_cast<double>(middle) / kSteps;
    (fits(input, limit) ? enough : too_little) = middle;
  }
  state.fraction = static_cast<double>(enough) / kSteps;
}

}  // namespace

PlanInput with_tiers_chosen(PlanInput input, std::int64_t limit) {
  OffloadedState& masters = input.offload.masters;
  OffloadedState& moments = input.offload.moments;
  OffloadedState& parameters = input.offload.parameters;
  // What is chosen later is in memory at first.
  const auto is_open = [](OffloadedState& state) {
    return std::exchange(state.tier, state.tier == Tier::kAuto ? Tier::kMemory : state.tier) == Tier::kAuto;
  };
  const bool chooses_masters = is_open(masters), chooses_parameters = is_open(parameters);
  if (moments.tier == Tier::kAuto) choose(input, moments, limit);
  if (chooses_masters) choose(input, masters, limit);
  if (chooses_parameters) choose(input, parameters, limit);
  return input;
}

}  // namespace tessera
