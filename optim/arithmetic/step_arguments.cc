#include "optim/arithmetic/step_arguments.h"

namespace tessera {
namespace {

std::size_t parameter_bytes(WeightFormat weights) { return weights == WeightFormat::kF32AndF32 ? 4 : 2; }

StateArgument part_of(const StateArgument& state, StateDType dtype, std::size_t begin) {
  if (state.data == nullptr) return {};
  const StateBytes before = state_bytes(dtype, static_cast<std::int64_t>(begin));
  return {static_cast<std::byte*>(state.data) + before.data,
          state.scales == nullptr ? nullptr : state.scales + begin / kStateBlock};
}

}  // namespace

StepArguments part_of(const StepArguments& a, std::size_t begin, std::size_t count) {
  StepArguments part = a;
  part.numel = count;
  part.gradient = a.gradient + begin;
  if (a.master != nullptr) part.master = a.master + begin;
  if (a.low != nullptr) part.low = a.low + begin;
  if (a.parameter != nullptr)
    part.parameter = static_cast<std::byte*>(a.parameter) + begin * parameter_bytes(a.weights);
  for (int i = 0; i < kMostRuleStates; ++i) part.states[i] = part_of(a.states[i], a.state_dtype, begin);
  if (a.average.values != nullptr) part.average.values = a.average.values + begin;
  part.first_element = a.first_element + static_cast<std::uint32_t>(begin);
  return part;
}

}  // namespace tessera
