#include <algorithm>

#include "runtime/base/log.h"
#include "runtime/engine/engine_state.h"
#include "tessera/engine.h"
#include "tessera/error.h"

namespace tessera {

struct Gathered::State {
  Engine::State& engine;
  Mode mode;
  std::vector<Unit*> units;
};

namespace {

std::vector<Unit*> units_with(const std::vector<std::unique_ptr<Unit>>& units, const std::vector<at::Tensor>& parameters) {
  std::vector<Unit*> found;
  for (const auto& unit : units) {
    const auto holds = [&](const at::Tensor& wanted) {
      for (const auto& group : unit->groups) {
        for (const FlatParameter& parameter : group->parameters) {
          if (parameter.tensor.is_same(wanted)) return true;
        }
      }
      return false;
    };
    if (std::any_of(parameters.begin(), parameters.end(), holds)) found.push_back(unit.get());
  }
  return found;
}

/// Gathers and pins them; replicated units are always there.
std::vector<Unit*> held(std::vector<Unit*> units) {
  for (Unit* unit : units) {
    if (unit->residency()) unit->residency()->hold(*unit);
  }
  return units;
}

}  // namespace

Gathered::Gathered(Engine& engine, Mode mode)
    : state_(std::make_unique<State>(State{*engine.state_, mode, held(pointers_to(engine.state_->units))})) {}

Gathered::Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Mode mode)
    : state_(std::make_unique<State>(State{*engine.state_, mode, held(units_with(engine.state_->units, parameters))})) {}

void Gathered::close() {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  for (Unit* unit : state->units) {
    if (unit->residency()) unit->residency()->unpin(*unit);
  }
  if (state->mode == kWrite) {
    for (Unit* unit : state->units) store_parameters(*unit, *state->engine.axes.world);
    for (Unit* unit : state->units) {
      if (unit->residency()) unit->residency()->drop(*unit);  // other ranks' gathered copies are stale
    }
  }
  if (state->engine.residency) state->engine.residency->give_back_overflow();
}

Gathered::~Gathered() {
  try {
    close();
  } catch (const std::exception& error) {
    log_error(std::string("Gathered: changes could not be stored: ") + error.what());
  }
}

}  // namespace tessera
