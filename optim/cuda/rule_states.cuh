#pragma once

#include "optim/cuda/device_runs.cuh"

namespace tessera::cuda {
namespace {

/// The 8-bit code for a kind of state.
template <StateCode kCode>
struct CodeOf : SignedBlockCode<ScalarLane> {};
template <>
struct CodeOf<StateCode::kRoot> : RootBlockCode<ScalarLane> {};

/// Calls `body.template operator()<k>()` for each state of a rule.
template <class Rule, int k = 0, class Body>
__device__ __forceinline__ void for_states(const Body& body) {
  if constexpr (k < Rule::kStates) {
    body.template operator()<k>();
    for_states<Rule, k + 1>(body);
  }
}

/// The memory and the format of a rule's states.
template <class Rule, StateDType kStates, int k>
struct StateOf {
  static constexpr StateCode kCode = Rule::kCodes[k];
  static constexpr bool kIsOptional = Rule::kOptional[k];
  static constexpr StateDType kDType = kCode == StateCode::kExact ? StateDType::kF32 : kStates;
  static constexpr bool kKeepsRoot = kCode == StateCode::kRoot && kDType == StateDType::k8Bit;
  static __device__ __forceinline__ bool is_kept(const StepArguments& a) {
    return !kIsOptional || a.states[k].data != nullptr;
  }
};

}  // namespace
}  // namespace tessera::cuda
