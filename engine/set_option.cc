#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

/// The strategy's own row, which says what is allowed.
const StrategyKey& row_of(const OptionKey& key) {
  std::string pointer = "/optimizer/" + std::string(key.name);
  for (char& c : pointer) c = c == '.' ? '/' : c;
  const StrategyKey* const row = find_strategy_key(pointer);
  TORCH_INTERNAL_ASSERT(row, "no key ", pointer);
  return *row;
}

bool has_effect(const OptionKey& key, const Strategy& strategy) {
  const Condition& condition = row_of(key).only_if;
  return !condition.holds || condition.holds(strategy);
}

const OptionKey& key_named(const std::string& name, const Strategy& strategy) {
  std::vector<std::string> names;
  for (const OptionKey& key : UpdateOptions::keys()) {
    if (!has_effect(key, strategy)) continue;
    if (name == key.name) return key;
    names.emplace_back(key.name);
  }
  const std::string type = name_of(strategy.optimizer.type);
  expect(name != "lr", "set_option has no \"lr\". [T0269] hint: call set_lr for it");
  expect(false, "set_option: \"", name, "\" is no number of ", type, " that can change while it trains",
         hint_of_names(name, names));
  return UpdateOptions::keys().front();
}

bool is_allowed(const StrategyKey& row, double number) {
  if (row.field.kind == ValueKind::kBoolean) return number == 0 || number == 1;
  return std::isfinite(number) && row.range.contains(number);
}

/// Where momentum begins, and where it is gone before any gradient was in it.
void expect_momentum(const std::string& name, double momentum, bool has_memory) {
  expect(has_memory || momentum == 0, "set_option: ", name, " ", momentum,
         " has no memory, since the strategy's optimizer.", name,
         " is 0. [T0270] hint: begin with a momentum above 0 in the "
         "strategy, and set it to 0 before the first step");
}

}  // namespace

void Engine::State::set_option(const std::string* group, const std::string& name, std::span<const double> numbers) {
  const OptimizerConfig& config = strategy.optimizer;
  const OptionKey& key = key_named(name, strategy);
  const StrategyKey& row = row_of(key);
  expect(numbers.size() == key.count, "set_option: ", name, " wants ", key.count,
         key.count == 1 ? " number" : " numbers", ", got ", numbers.size(),
         ". [T0271] hint: give as many as the strategy's key has");
  for (const double number : numbers) {
    expect(is_allowed(row, number), "set_option: ", name, " must be ",
           row.field.kind == ValueKind::kBoolean ? std::string("0 or 1") : describe_range(row.range), ", got ", number,
           ". [T0272] hint: look where the program computed it");
  }
  const bool is_muons = name == "muon.momentum";
  if (name == "momentum" || is_muons)
    expect_momentum(name, numbers[0], (is_muons ? config.muon.momentum : config.momentum) > 0);
  if (is_muons && group) {
    expect(numbers[0] == options(FlatParameter::kNoGroup).at(name)[0],
           "set_option: muon.momentum is that of all matrices. [T0273] hint: leave the group out");
    return;
  }
  expect_not_updated("set_option");
  const auto index = group ? std::optional(index_of_group("set_option", *group)) : std::nullopt;
  for (std::size_t i = 0; i < key.count; ++i) step->options().set(key.first + i, numbers[i], index);
}

std::map<std::string, std::vector<double>> Engine::State::options(std::size_t group) const {
  const OptimizerConfig config = step->options().of(group);
  std::map<std::string, std::vector<double>> all;
  for (const OptionKey& key : UpdateOptions::keys()) {
    if (has_effect(key, strategy)) all[key.name] = UpdateOptions::numbers_in(config, key);
  }
  return all;
}

void Engine::set_option(const std::string& name, double value) { state_->set_option(nullptr, name, {&value, 1}); }

void Engine::set_option(const std::string& name, std::pair<double, double> value) {
  const double numbers[] = {value.first, value.second};
  state_->set_option(nullptr, name, numbers);
}

void Engine::set_option(const std::string& group, const std::string& name, double value) {
  state_->set_option(&group, name, {&value, 1});
}

void Engine::set_option(const std::string& group, const std::string& name, std::pair<double, double> value) {
  const double numbers[] = {value.first, value.second};
  state_->set_option(&group, name, numbers);
}

std::map<std::string, std::vector<double>> Engine::options() const { return state_->options(FlatParameter::kNoGroup); }

std::map<std::string, std::vector<double>> Engine::options(const std::string& group) const {
  return state_->options(state_->index_of_group("options", group));
}

}  // namespace tessera
