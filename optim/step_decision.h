#pragma once

#include "optim/arithmetic/step_decision.h"

namespace tessera {

/// Decides a step on the host, with the bits of a GPU. `step` has the step's sums, and the state after the step before;
/// it gets the decision, and the state after this step. `losses`: the ring of SpikeState; null without a search for
/// spikes.
void decide(const DecisionRule& rule, const StepFacts& facts, double* losses, StepDecision& step);

}  // namespace tessera
