#include "runtime/config/optimizer_defaults.h"

#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

/// Returns the defaults of torch.optim, or those of timm for lion, lamb and lars, which PyTorch does not have.
OptimizerDefaults of_libraries(OptimizerType type) {
  using enum OptimizerType;
  switch (type) {
    case kAdamW:
    case kOwn:
    case kOwnMatrix:
      return {};
    case kAdam:
    case kSgd:
      return {.weight_decay = 0};
    case kAdagrad:
      return {.lr = 1e-2, .eps = 1e-10, .weight_decay = 0};
    case kRmsprop:
    case kAdafactor:
      return {.lr = 1e-2, .weight_decay = 0};
    case kMuon:
      return {.weight_decay = 0.1};
    case kLion:
      return {.lr = 1e-4, .beta2 = 0.99, .weight_decay = 0};
    case kLamb:
      return {.eps = 1e-6};
    case kLars:
      return {.lr = 1.0, .weight_decay = 0};
  }
  return {};
}

}  // namespace

OptimizerDefaults defaults_of(OptimizerType type, std::int64_t version) {
  if (version == 1) return {.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW};  // 0.1 used adamw's defaults for every rule
  return of_libraries(type);
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
