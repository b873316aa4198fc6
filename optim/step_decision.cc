#include "optim/step_decision.h"

namespace tessera {

void decide(const DecisionRule& rule, const StepFacts& facts, double* losses, StepDecision& step) {
  take_verdict(rule, facts, verdict_on(rule, step, facts), /*was_skipped=*/false, losses, step);
}

}  // namespace tessera
