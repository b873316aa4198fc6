#include <memory>
#include <string>
#include <utility>

#include "engine/engine_state.h"
#include "engine/memory/carried_states.h"
#include "engine/step/outer_steps.h"
#include "runtime/base/log.h"

namespace tessera {

std::unique_ptr<Engine::State> Engine::State::planned_anew(std::int64_t steps, const std::function<void()>& change) {
  const StepProgress progress = step->progress();
  const CarriedStates states(units, plan, position, memory, axes);
  detach_parameters();
  change();
  auto next = std::make_unique<State>(module, given_strategy, mesh, own_rules, steps);
  states.write_to(next->units, *next->whole.control);
  next->step->resume(progress);
  next->attempts = attempts;
  next->exceptions_at_start = exceptions_at_start;
  next->step_finishes_saves = step_finishes_saves;
  return next;
}

bool Engine::State::follow_sync(std::unique_ptr<State>& state, std::int64_t steps) {
  State& s = *state;
  const bool begins = s.strategy.sync.after(steps).makes_outer_steps();
  if (begins == s.sync.makes_outer_steps()) return false;
  std::unique_ptr<State> replaced;  // goes when nothing refers to it any more
  s.or_abort("\"sync\"", [&] {
    s.expect_parameters();
    s.bring_replicas_together("\"sync\"");
    auto next = s.planned_anew(steps, [] {});
    replaced = std::exchange(state, std::move(next));
  });
  if (state->mesh.rank() == 0)
    log_info("after step " + std::to_string(steps) +
             (begins ? " replicas train by themselves between outer steps"
                     : " gradients are summed over replicas in every step"));
  return true;
}

}  // namespace tessera
