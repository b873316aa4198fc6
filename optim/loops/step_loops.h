#pragma once

#include "optim/arithmetic/instruction_set.h"
#include "optim/arithmetic/step_arguments.h"
#include "optim/rules/muon.h"
#include "optim/rules/rules.h"

namespace tessera {

/// The loops (step_kernel.h) in the variant for one instruction set.
struct StepLoops {
  /// [StepRule]: the rule's pass over a run. A rule that computes directions writes them over a copy of the weights
  /// (WeightFormat::kF32).
  void (*update[kStepRules])(const RuleConstants& constants, const StepArguments& arguments);
  /// Updates Muon's momentum. It writes the matrix, which will be made orthogonal later, over the weights
  /// (WeightFormat::kF32).
  void (*muon_direction)(const MuonMomentumConstants& constants, const StepArguments& arguments);
  /// `read_weights` writes the masters to `masters` [numel]. `assign_weights` copies new masters from
  /// StepArguments::gradient, and updates the averages, as a rule's pass does.
  void (*read_weights)(const StepArguments& arguments, float* masters);
  void (*assign_weights)(const StepArguments& arguments);
  /// Updates the averages (StepArguments::average) of weights that a step does not change.
  void (*average)(const StepArguments& arguments);
  /// Exchanges weights and their averages.
  void (*swap_average)(const StepArguments& arguments);
};

extern const StepLoops kPortableStepLoops;
extern const StepLoops kAvx2StepLoops;    ///< exists on x86-64 only
extern const StepLoops kAvx512StepLoops;  ///< exists on x86-64 only

/// Returns the loops for an instruction set. REQUIRES: supports(set).
const StepLoops& step_loops(InstructionSet set);

}  // namespace tessera
