#pragma once

#include "optim/arithmetic/step_decision.h"

namespace tessera {

/// Decides a step on the host, with the bits of a GPU. Before the call, `step` has the step's sums, and the state after
/// the step before. The function writes the decision, and the state after this step, into `step`. `losses` is the ring
/// of SpikeState; it is null if spikes are not searched for.
void decide(const DecisionRule& rule, const StepFacts& facts, double* losses, StepDecision& step);

}  // namespace tessera
