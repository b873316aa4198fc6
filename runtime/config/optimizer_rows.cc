#include "runtime/config/optimizer_rows.h"

#include "runtime/base/text.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

/// Returns the type's row. Returns the first row if `type` is no valid type.
const OptimizerRow& row_of(OptimizerType type) {
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.type == type) return row;
  }
  return optimizer_rows().front();
}

}  // namespace

const std::vector<OptimizerRow>& optimizer_rows() {
  using namespace optimizer_traits;
#define TESSERA_ROW(enumerator, word, text, traits, ...) \
  {OptimizerType::enumerator, word, text, traits, OptimizerDefaults{__VA_ARGS__}},
  static const std::vector<OptimizerRow> rows = {TESSERA_OPTIMIZER_TYPES(TESSERA_ROW)};
#undef TESSERA_ROW
  return rows;
}

bool has(OptimizerType type, unsigned traits) { return (row_of(type).traits & traits) != 0; }

std::string types_with(unsigned traits) {
  std::vector<std::string> words;
  for (const OptimizerRow& row : optimizer_rows()) {
    if ((row.traits & traits) != 0) words.push_back(row.word);
  }
  return either(words);
}

OptimizerDefaults defaults_of(OptimizerType type, std::int64_t version) {
  // Version 0.1 used adamw's defaults for every rule.
  if (version == 1) return {.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW};
  return row_of(type).defaults;
}

void fill_in_defaults(OptimizerConfig& optimizer) {
  const OptimizerDefaults defaults = defaults_of(optimizer.type, optimizer.defaults_version);
  optimizer.lr.fill_in(defaults.lr);
  optimizer.beta1.fill_in(defaults.beta1);
  optimizer.beta2.fill_in(defaults.beta2);
  optimizer.eps.fill_in(defaults.eps);
  optimizer.weight_decay.fill_in(defaults.weight_decay);
  optimizer.muon.adjust_lr.fill_in(defaults.adjust_lr);
}

std::vector<ChangedDefault> changed_defaults(const OptimizerConfig& optimizer) {
  const auto with_defaults_of = [&](std::int64_t version) {
    Strategy strategy;
    strategy.optimizer = optimizer;
    strategy.optimizer.defaults_version = version;
    fill_in_defaults(strategy.optimizer);
    return strategy;
  };
  const Strategy now = with_defaults_of(OptimizerConfig::kDefaultsVersion), before = with_defaults_of(1);
  std::vector<ChangedDefault> changed;
  for (const StrategyKey& key : strategy_keys()) {
    if (!key.rules_default || (!key.only_if.text.empty() && !key.only_if.holds(now))) continue;
    const auto value = key.field.get(now), old = key.field.get(before);
    if (value != old) changed.push_back({dotted(key.pointer), value.dump(), old.dump()});
  }
  return changed;
}

}  // namespace tessera
