#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "engine/checkpoint/stored_states.h"
#include "engine/engine_state.h"
#include "engine/memory/carried_states.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/outer_steps.h"
#include "runtime/base/log.h"

namespace tessera {

std::unique_ptr<Engine::State> Engine::State::planned_anew(std::int64_t steps, const std::function<void()>& change,
                                                           std::shared_ptr<Strategy> other) {
  StepProgress progress = step->progress();
  change();
  frozen_states.keep_masters(units, plan.input().placement.optimizer, position, *whole.control);
  const CarriedStates states(units, plan, position, memory, axes);
  const StoredStates stored(strategy, own_rules, units);
  const auto name_of = [&](const FlatGroup& group, std::size_t state) -> const std::string& {
    return stored.name_in(group, state);
  };
  detach_parameters();
  auto next = std::make_unique<State>(module, other ? std::move(other) : given_strategy, mesh, own_rules, steps);
  Collectives& control = *next->whole.control;
  next->frozen_states = std::move(frozen_states);
  states.write_to(next->units, control, name_of, next->frozen_states, progress.updates);
  next->frozen_states.note_updates(progress.updates);
  next->frozen_states.give_back(next->units, control, name_of, progress.updates);
  next->report_frozen_states();
  const std::size_t groups = next->strategy.optimizer.groups.size();
  progress.rates.resize(1 + groups, std::numeric_limits<double>::quiet_NaN());
  progress.options.resize((1 + groups) * UpdateOptions::kNumbers, std::numeric_limits<double>::quiet_NaN());
  next->step->resume(progress);
  next->attempts = attempts;
  next->has_looked_at_loss = has_looked_at_loss;
  next->exceptions_at_start = exceptions_at_start;
  next->step_finishes_saves = step_finishes_saves;
  return next;
}

void Engine::State::report_frozen_states() const {
  if (!frozen_states.empty() && mesh.rank() == 0) log_info(frozen_states.describe());
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
    next->rounds = s.rounds;
    replaced = std::exchange(state, std::move(next));
  });
  if (state->mesh.rank() == 0)
    log_info("after step " + std::to_string(steps) +
             (begins ? " replicas train by themselves between outer steps"
                     : " gradients are summed over replicas in every step"));
  return true;
}

}  // namespace tessera
