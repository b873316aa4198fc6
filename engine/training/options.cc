#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/step/agree/update_options.h"
#include "engine/training/training.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

/// Returns the key's row of the strategy table, which says which values are allowed.
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

/// Throws if momentum is set to a value above 0 and has no memory. The message says how a program can begin with
/// momentum, and how it can switch momentum off.
void expect_momentum(const std::string& name, double momentum, bool has_memory) {
  expect(has_memory || momentum == 0, "set_option: ", name, " ", momentum,
         " has no memory, since the strategy's optimizer.", name,
         " is 0. [T0270] hint: begin with a momentum above 0 in the strategy, and set it to 0 before the first step");
}

}  // namespace

std::size_t Training::index_of_group(const char* what, const std::string& group) const {
  const std::vector<ParameterGroup>& groups = job.strategy.optimizer.groups;
  const auto found = std::ranges::find(groups, group, &ParameterGroup::name);
  std::vector<std::string> names;
  for (const ParameterGroup& each : groups) names.push_back(each.name);
  expect(!group.empty(), what,
         " wants the name of a group of optimizer.groups, got an empty one. [T0141] hint: leave the group out to mean "
         "all parameters");
  expect(found != groups.end(), what, ": no group of optimizer.groups is named \"", group, "\"",
         hint_of_names(group, names));
  return static_cast<std::size_t>(found - groups.begin());
}

void Training::set_lr(const std::string* group, double lr) {
  expect(job.strategy.lr_schedule.type == LrScheduleType::kManual,
         "set_lr: the schedule sets the learning rate. [T0142] hint: set lr_schedule.type to \"manual\"");
  expect(std::isfinite(lr) && lr >= 0 && lr <= 1000, "set_lr wants a rate from 0 to 1000, got ", lr,
         ". [T0143] hint: look where the program computed it; 0 stops updates");
  expect_not_updated("set_lr");
  step->set_lr(lr, group ? std::optional(index_of_group("set_lr", *group)) : std::nullopt);
}

void Training::set_epoch_samples(std::int64_t samples) {
  constexpr std::int64_t kMost = 1'000'000'000'000;  // the limit of lr_schedule.epoch_samples
  expect(samples > 0 && samples <= kMost, "set_epoch_samples wants a number from 1 to 1e12, got ", samples,
         ". [T0906] hint: give the samples that one epoch has over all ranks");
  expect(window.microbatch == 0,
         "set_epoch_samples between backward and step: the step's rate follows from the length of an epoch. [T0907] "
         "hint: call it before the first backward");
  LrScheduleConfig& schedule = job.given_strategy->lr_schedule;
  if (schedule.warmup_epochs == 0) return;  // no rate depends on the length of an epoch
  std::vector<std::int64_t> all(static_cast<std::size_t>(job.axes.control->size()));
  job.or_abort("set_epoch_samples", [&] {
    throw_if_error(job.axes.control->all_gather("samples of an epoch", &samples, all.data(), sizeof samples).wait());
  });
  const auto other = std::ranges::find_if(all, [&](std::int64_t theirs) { return theirs != all[0]; });
  expect(other == all.end(), "set_epoch_samples: an epoch has ", all[0], " samples on rank 0, and ",
         other == all.end() ? 0 : *other, " on rank ", other - all.begin(),
         ". [T0908] hint: give the samples of all ranks together, which is one number");
  schedule.epoch_samples = samples;
}

void Training::set_option(const std::string* group, const std::string& name, std::span<const double> numbers) {
  const OptimizerConfig& config = job.strategy.optimizer;
  const OptionKey& key = key_named(name, job.strategy);
  const StrategyKey& row = row_of(key);
  expect(numbers.size() == key.count, "set_option: ", name, " wants ", counted(key.count, "number"), ", got ",
         numbers.size(), ". [T0271] hint: give as many as the strategy's key has");
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

std::map<std::string, std::vector<double>> Training::options(std::size_t group) const {
  const OptimizerConfig config = step->options().of(group);
  std::map<std::string, std::vector<double>> all;
  for (const OptionKey& key : UpdateOptions::keys()) {
    if (has_effect(key, job.strategy)) all[key.name] = UpdateOptions::numbers_in(config, key);
  }
  return all;
}

}  // namespace tessera
