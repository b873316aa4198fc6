#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// An update rule is a formula for one element. Each has a file here, which has its states (what it keeps of an
// element), its configuration, the constants that are folded from it once a step, and the formula itself, which CPUs
// and GPUs share.

/// The codes of a state's numbers where optimizer.state_dtype is narrow.
enum class StateCode {
  kSigned,  ///< numbers of both signs
  kRoot,    ///< numbers that are not negative; 8 bits hold their square root, which the formula has anyway
  kExact,   ///< fp32, whatever the others are
};

/// The numbers that rules are configured with (OptimizerConfig), in fp64. A rule reads the numbers that it knows.
struct RuleNumbers {
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, momentum = 0, dampening = 0, alpha = 0, lr_decay = 0;
  std::int64_t freeze_step = 0;
  bool is_decoupled = false;  ///< weight decay of adamw, not of adam
  bool is_nesterov = false;
  bool is_centered = false;
};

/// The result of a rule for one element, or for a vector of them.
template <class V, int kStates>
struct RuleElement {
  typename V::Float weight;
  typename V::Float states[kStates];
  typename V::Float root;  ///< square root of the kRoot state; unused without one
};

}  // namespace tessera
