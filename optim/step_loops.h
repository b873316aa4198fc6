#pragma once

#include "optim/instruction_set.h"
#include "optim/step_arguments.h"

namespace tessera {

/// What Adam's loop needs, folded from hyperparameters, step and learning rate once a call (adamw.cc), so that an
/// element costs one square root and one division.
struct AdamConstants {
  float gradient_scale;   ///< g = gradient * gradient_scale
  float l2;               ///< adam: g += l2 * p; unused by adamw
  float decay;            ///< adamw: p *= decay, which is 1 - lr * weight_decay
  float one_minus_beta1;  ///< m += (g - m) * one_minus_beta1
  float beta2;            ///< v = v * beta2 + (g * g) * one_minus_beta2
  float one_minus_beta2;
  float step_size;  ///< p -= step_size * m / (sqrt(v) + eps): lr * sqrt(1 - beta2^t) / (1 - beta1^t)
  float eps;        ///< eps * sqrt(1 - beta2^t)
  bool decoupled;   ///< adamw's weight decay, not adam's
};

/// What SGD's loop needs.
struct SgdConstants {
  float gradient_scale;
  float l2;        ///< g += l2 * p
  float momentum;  ///< buffer = buffer * momentum + g * one_minus_dampening
  float one_minus_dampening;
  float lr;
  bool has_momentum;
  bool first_step;  ///< buffer = g, as PyTorch's first step does whatever the dampening
  bool nesterov;    ///< the step follows g + momentum * buffer instead of the buffer
};

/// One instruction set's variants of the loops (step_kernel.h).
struct StepLoops {
  void (*adam)(const AdamConstants& constants, const StepArguments& arguments);
  void (*sgd)(const SgdConstants& constants, const StepArguments& arguments);
};

extern const StepLoops kPortableStepLoops;
extern const StepLoops kAvx2StepLoops;    ///< exists on x86-64 only
extern const StepLoops kAvx512StepLoops;  ///< exists on x86-64 only

/// REQUIRES: supports(set).
const StepLoops& step_loops(InstructionSet set);

}  // namespace tessera
