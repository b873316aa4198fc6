#include "tessera/reduce_lr_on_plateau.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "runtime/border/expect.h"
#include "tessera/engine.h"

namespace tessera {

ReduceLROnPlateau::ReduceLROnPlateau(Engine& engine) : ReduceLROnPlateau(engine, Options{}) {}

ReduceLROnPlateau::ReduceLROnPlateau(Engine& engine, const Options& options)
    : engine_(engine),
      options_(options),
      best_(options.mode == Mode::kMin ? std::numeric_limits<double>::infinity()
                                       : -std::numeric_limits<double>::infinity()) {
  expect(options.factor > 0 && options.factor < 1, "ReduceLROnPlateau wants a factor above 0 and below 1, got ",
         options.factor, ". [T0257] hint: 0.5 halves the rate");
  expect(options.patience >= 0 && options.cooldown >= 0 && options.threshold >= 0 && options.min_lr >= 0 &&
             options.eps >= 0,
         "ReduceLROnPlateau wants patience, cooldown, threshold, min_lr and eps of at least 0. [T0258] hint: leave out "
         "what should have its default");
  expect(engine.strategy().lr_schedule.type == LrScheduleType::kManual,
         "ReduceLROnPlateau: the schedule sets the learning rate. [T0259] hint: set lr_schedule.type to \"manual\"");
}

bool ReduceLROnPlateau::improves(double measure) const {
  const bool falls = options_.mode == Mode::kMin;
  const double wanted = options_.threshold_mode == Threshold::kAbsolute
                            ? best_ + (falls ? -options_.threshold : options_.threshold)
                            : best_ * (falls ? 1.0 - options_.threshold : 1.0 + options_.threshold);
  return falls ? measure < wanted : measure > wanted;
}

bool ReduceLROnPlateau::step(double measure) {
  if (improves(measure)) {
    best_ = measure;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooling_ > 0) {
    --cooling_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) return false;
  cooling_ = options_.cooldown;
  bad_ = 0;
  return reduce();
}

bool ReduceLROnPlateau::reduce() {
  bool changed = false;
  const auto reduced = [&](double rate) {
    const double lower = std::max(rate * options_.factor, options_.min_lr);
    if (rate - lower <= options_.eps) return rate;
    changed = true;
    return lower;
  };
  // set_lr(rate) gives every group of parameters its usual share of that rate. So the rates of groups that have their
  // own rate are set afterwards.
  const double everybodys = engine_.lr();
  std::vector<std::pair<std::string, double>> own;
  for (const ParameterGroup& group : engine_.strategy().optimizer.groups) {
    if (group.name.empty()) continue;
    const double rate = engine_.lr(group.name);
    if (rate != everybodys * group.lr_ratio) own.emplace_back(group.name, reduced(rate));
  }
  engine_.set_lr(reduced(everybodys));
  for (const auto& [name, rate] : own) engine_.set_lr(name, rate);
  return changed;
}

}  // namespace tessera
