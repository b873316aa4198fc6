#pragma once

#include "optim/step_message.h"

namespace tessera::cuda {
namespace {

/// Returns the learning rate and other numbers of the parameter's group; null if the parameter is in no group.
__device__ __forceinline__ const GroupNumbers* group_of(const StepTables& t, unsigned p) {
  const std::uint32_t number = t.group_number ? t.group_number[p] : 0;
  return number == 0 ? nullptr : &t.group_numbers[number - 1];
}

/// Returns the parameter's rate, if the common rate is `lr`.
__device__ __forceinline__ float rate_of(const StepTables& t, unsigned p, double lr) {
  const GroupNumbers* const group = group_of(t, p);
  if (group == nullptr) return static_cast<float>(lr);
  return static_cast<float>(group->lr == group->lr ? group->lr : lr * group->lr_ratio);
}

}  // namespace
}  // namespace tessera::cuda
