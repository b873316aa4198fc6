#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// An update rule is a formula for one element. Each rule has a file in this folder, and a line in rules.h. The file
// describes the states that the rule keeps for an element. It computes constants from the rule's configuration, once
// per step. It has the formula itself, which CPUs and GPUs share. A rule is a struct with
//
//   Constants                    the type of its constants
//   kStates                      how many states it has; then for each state
//   kCodes, kNames               its code, and its name in checkpoints, which is PyTorch's where PyTorch has the rule
//   kOptional                    whether some configurations do not have it
//   keeps(numbers, state)        whether this configuration has the state; only rules with optional states have it
//   constants(numbers, step, lr) computes the constants of a parameter's step; steps count from 1
//   element(c, g, weight, old)   the formula
//   kMakesDirection              true: `element` returns a direction in place of the weight, and SgdRule takes the step
//   trust_ratio(numbers, trust_coefficient, weights_norm, update_norm)
//                                the factor of a parameter's rate (trust_ratio.h)
//
// Only rules whose type has optimizer_traits::kLayers have kMakesDirection and trust_ratio.

/// The codes for the numbers of a state if optimizer.state_dtype is narrower than fp32.
enum class StateCode {
  kSigned,  ///< numbers of both signs
  kRoot,    ///< numbers that are not negative; with 8 bits their square roots are stored, which the formula computes
            ///< anyway
  kExact,   ///< fp32, whatever the format of the other states
};

/// The numbers of a rule's configuration (OptimizerConfig), in fp64. A rule reads only the numbers that its formula
/// uses.
struct RuleNumbers {
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, momentum = 0, dampening = 0, alpha = 0, lr_decay = 0;
  std::int64_t freeze_step = 0;
  bool is_decoupled = false;  ///< whether weight decay is decoupled, as in adamw
  bool is_nesterov = false;
  bool is_centered = false;
};

/// The result of a rule for one element, or for a vector of elements.
template <class V, int kStates>
struct RuleElement {
  typename V::Float weight;
  typename V::Float states[kStates];
  typename V::Float root;  ///< square root of the kRoot state; unused if there is no such state
};

}  // namespace tessera
