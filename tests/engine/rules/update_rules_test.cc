// Tests every update rule in an Engine. Numbers are PyTorch's, and all strategies give the same bits, in memory and on
// disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_names.h"
#include "tessera/error.h"
#include "tessera/reduce_lr_on_plateau.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace update_rules_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::size_t kSteps = 20;

/// The parameter groups of PyTorch's optimizer. Each has its own share of the rate and its own decay.
using PlainGroups = std::vector<torch::optim::OptimizerParamGroup>;

/// A rule, and PyTorch's optimizer for it. Optimizers are made without their own defaults. If a
/// group's option has its type's default value, LibTorch 2.15 and later use the optimizer's value instead.
struct Rule {
  std::string name;
  OptimizerConfig config;
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>(const OptimizerConfig&, double lr, double decay)>
      options = {};
  std::function<std::unique_ptr<torch::optim::Optimizer>(const PlainGroups&)> optimizer = {};
};

Rule adagrad() {
  return {"adagrad",
          {.type = OptimizerType::kAdagrad, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.01, .lr_decay = 0.05},
          [](const OptimizerConfig& c, double lr, double decay) {
            auto options = std::make_unique<torch::optim::AdagradOptions>(lr);
            options->lr_decay(c.lr_decay).weight_decay(decay).eps(c.eps);
            return options;
          },
          [](const PlainGroups& groups) { return std::make_unique<torch::optim::Adagrad>(groups); }};
}

Rule rmsprop(double momentum, bool centered) {
  return {"rmsprop, momentum " + std::to_string(momentum) + (centered ? ", centered" : ""),
          {.type = OptimizerType::kRmsprop,
           .lr = 1e-3,
           .eps = 1e-2,
           .weight_decay = 0.01,
           .momentum = momentum,
           .alpha = 0.9,
           .centered = centered},
          [](const OptimizerConfig& c, double lr, double decay) {
            auto options = std::make_unique<torch::optim::RMSpropOptions>(lr);
            options->alpha(c.alpha).eps(c.eps).weight_decay(decay).momentum(c.momentum).centered(c.centered);
            return options;
          },
          [](const PlainGroups& groups) { return std::make_unique<torch::optim::RMSprop>(groups); }};
}

Rule sgd() {
  return {"sgd",
          {.type = OptimizerType::kSgd, .lr = 1e-1, .weight_decay = 0.01, .momentum = 0.9, .nesterov = true},
          [](const OptimizerConfig& c, double lr, double decay) {
            auto options = std::make_unique<torch::optim::SGDOptions>(lr);
            options->momentum(c.momentum).nesterov(c.nesterov).weight_decay(decay);
            return options;
          },
          [](const PlainGroups& groups) {
            return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(1));
          }};
}

Rule frozen_adamw() { return {"adamw, frozen", {.type = OptimizerType::kAdamW, .lr = 1e-3, .freeze_step = 2}}; }
Rule lion() { return {"lion", {.type = OptimizerType::kLion, .lr = 1e-3, .beta2 = 0.99, .weight_decay = 0.01}}; }

/// Sets the rule with three groups: vectors without decay at twice the rate, blocks with much decay, and all other
/// parameters.
void with_rule(Strategy& s, const Rule& rule) {
  const StateDType states = s.optimizer.state_dtype;
  s.optimizer = rule.config;
  s.optimizer.state_dtype = states;
  s.optimizer.groups = {{.match = {"*"}, .max_dim = 1, .lr_ratio = 2, .weight_decay = 0.0},
                        {.match = {"blocks.*.up.weight", "blocks.*.down.weight"}, .weight_decay = 0.3}};
  s.gradient_clipping = 0;
}

/// Trains with PyTorch's optimizer. `adjust` changes each group's options before each step.
Values train_plainly(const Rule& rule,
                     const std::function<void(torch::optim::OptimizerOptions&, std::size_t i)>& adjust = nullptr) {
  Tiny model = make_tiny({}, /*deferred=*/false);
  std::vector<at::Tensor> kinds[3];
  for (const auto& item : model->named_parameters()) {
    const bool is_block = item.key().starts_with("blocks.");
    kinds[item.value().dim() == 1 ? 0 : is_block ? 1 : 2].push_back(item.value());
  }
  const OptimizerConfig& c = rule.config;
  PlainGroups groups;
  groups.emplace_back(kinds[0], rule.options(c, 2 * c.lr, 0.0));
  groups.emplace_back(kinds[1], rule.options(c, c.lr, 0.3));
  groups.emplace_back(kinds[2], rule.options(c, c.lr, c.weight_decay));
  const auto optimizer = rule.optimizer(groups);
  const auto batches = make_batches(6, 24, 5, TinyOptions{}.vocab);
  for (std::size_t i = 0; i < kSteps; ++i) {
    for (auto& group : optimizer->param_groups()) {
      if (adjust) adjust(group.options(), i);
    }
    optimizer->zero_grad();
    model->forward(batches[i % 6].tokens, batches[i % 6].targets).backward();
    optimizer->step();
  }
  return values_of(*model);
}

TEST(UpdateRules, EveryRuleEqualsPyTorch) {
  const Rule rules[] = {adagrad(), sgd(), rmsprop(0, false), rmsprop(0.9, false), rmsprop(0.9, true), rmsprop(0, true)};
  for (const Rule& rule : rules) {
    const Values wanted = train_plainly(rule);
    for (const int ranks : {1, 2, 3}) {
      // Several ranks add up gradients in another order than one process does.
      const double tolerance = ranks == 1 ? 2e-6 : 1e-5;
      on_each_placement(
          ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            const Values values = trained(mesh, strategy, kSteps);
            if (mesh.rank() == 0) expect_close(values, wanted, tolerance, rule.name);
          },
          [&](Strategy& s) { with_rule(s, rule); });
    }
  }
}

TEST(UpdateRules, HaveTheSameBitsUnderEveryStrategyInMemoryAndOnDisk) {
  const Rule rules[] = {frozen_adamw(), lion(), adagrad(), sgd(), rmsprop(0.9, false), rmsprop(0.9, true)};
  const auto exists = [](const Rule& rule, const Kept& kept, const Below*, const Placed&) {
    return !rule.config.centered || kept.state == StateDType::kF32;
  };
  MadeOnce<Values> firsts;
  for (const auto& each : pairwise_where(exists, rules, kOneOfEachKind, kInMemoryAndBelow, kOnePerPlacement)) {
    const Rule& rule = std::get<0>(each);
    const Kept& kept = std::get<1>(each);
    const Below* const below = std::get<2>(each);
    const Placed& placed = std::get<3>(each);
    const int ranks = 2;
    const auto train = [&](const Placed& on, const Below* lying) {
      const auto adjust = [&](Strategy& s) {
        adjusted_to(kept, lying)(s);
        with_rule(s, rule);
      };
      const Strategy strategy = strategy_for(on, adjust, kept.param);
      return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) { return trained(mesh, strategy, 5, kAwkward); });
    };
    const std::string of = std::string(rule.name) + ", " + name_of(kept) + " on " + std::to_string(ranks) + " ranks";
    const Values& first = firsts(of, [&] { return train(ShardingStrategy::kNoShard, nullptr); });
    EXPECT_TRUE(all_same_bits(train(placed, below), first))
        << of << ", " << name_of(placed) << (below ? ", below" : "");
  }
}

TEST(UpdateRules, StatesAreCarriedWhenFreezingChanges) {
  for (const Rule& rule : {adagrad(), rmsprop(0.9, true)}) {
    FirstValues first;
    on_each_placement(
        2,
        [&](const Mesh& mesh, const Strategy& strategy) {
          EXPECT_TRUE(first.same_bits(mesh, trained_with_weights_frozen_for_a_while(mesh, strategy))) << rule.name;
        },
        [&](Strategy& s) { with_rule(s, rule); });
  }
}

// ---- Numbers that change while training -----------------------------------------------------------------------------

/// Changes of options before step `i`, both on the Engine and in PyTorch's optimizer.
struct Changes {
  Rule rule;
  std::function<void(Engine&, std::size_t i)> engine;
  std::function<void(torch::optim::OptimizerOptions&, std::size_t i)> plain;
};

double momentum_at(std::size_t i) { return i % 5 == 3 || i % 5 == 4 ? 0.0 : 0.9 - 0.02 * static_cast<double>(i); }
double dampening_at(std::size_t i) { return i > 10 ? 0.1 * static_cast<double>(i % 3) : 0.0; }
bool nesterov_at(std::size_t i) { return i % 3 == 0; }

std::vector<Changes> all_changes() {
  return {{sgd(),
           [](Engine& engine, std::size_t i) {
             engine.set_option("momentum", momentum_at(i));
             engine.set_option("dampening", dampening_at(i));
             engine.set_option("nesterov", nesterov_at(i));
           },
           [](torch::optim::OptimizerOptions& options, std::size_t i) {
             auto& o = static_cast<torch::optim::SGDOptions&>(options);
             o.momentum(momentum_at(i)).dampening(dampening_at(i)).nesterov(nesterov_at(i));
           }},
          {rmsprop(0.9, true),
           [](Engine& engine, std::size_t i) {
             engine.set_option("momentum", momentum_at(i));
             engine.set_option("alpha", 0.8 + 0.01 * static_cast<double>(i % 4));
             engine.set_option("eps", i % 2 == 0 ? 1e-2 : 2e-2);
           },
           [](torch::optim::OptimizerOptions& options, std::size_t i) {
             auto& o = static_cast<torch::optim::RMSpropOptions&>(options);
             o.momentum(momentum_at(i)).alpha(0.8 + 0.01 * static_cast<double>(i % 4)).eps(i % 2 == 0 ? 1e-2 : 2e-2);
           }},
          {adagrad(),
           [](Engine& engine, std::size_t i) { engine.set_option("lr_decay", 0.1 / static_cast<double>(1 + i)); },
           [](torch::optim::OptimizerOptions& options, std::size_t i) {
             static_cast<torch::optim::AdagradOptions&>(options).lr_decay(0.1 / static_cast<double>(1 + i));
           }}};
}

TEST(UpdateRules, OptionsChangedAtEachStepEqualPyTorch) {
  for (const Changes& changes : all_changes()) {
    const Values wanted = train_plainly(changes.rule, changes.plain);
    on_each_placement(
        2,
        [&](const Mesh& mesh, const Strategy& strategy) {
          Session session(mesh, strategy);
          for (std::size_t i = 0; i < kSteps; ++i) {
            changes.engine(session.engine, i);
            session.train(i);
          }
          const Values values = session.values();
          if (mesh.rank() == 0) expect_close(values, wanted, 1e-5, changes.rule.name);
        },
        [&](Strategy& s) { with_rule(s, changes.rule); });
  }
}

/// Returns a rule with numbers that are not the defaults. Numbers that decide which states there are keep their
/// defaults.
OptimizerConfig with_other_numbers(OptimizerType type) {
  OptimizerConfig config;
  config.type = type;
  config.weight_decay = 0.2;
  if (has(type, optimizer_traits::kMomentum)) config.momentum = 0.5;
  if (type == OptimizerType::kMuon) config.muon.momentum = 0.5;
  if (has(type, optimizer_traits::kEps)) config.eps = 1e-2;
  if (has(type, optimizer_traits::kBetas)) config.beta1 = 0.7, config.beta2 = 0.9;
  if (has(type, optimizer_traits::kNesterov) && type != OptimizerType::kSgd) config.nesterov = true;
  if (type == OptimizerType::kSgd) config.dampening = 0.25;  // dampening excludes nesterov
  if (type == OptimizerType::kRmsprop) config.alpha = 0.8;
  if (type == OptimizerType::kAdagrad) config.lr_decay = 0.1;
  return config;
}

TEST(UpdateRules, OptionsSetBeforeTheFirstStepEqualTheStrategys) {
  using enum OptimizerType;
  for (const OptimizerType type : {kAdamW, kAdam, kSgd, kLion, kAdagrad, kRmsprop, kMuon, kAdafactor, kLamb, kLars}) {
    FirstValues first;
    for (const bool by_hand : {false, true}) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        const OptimizerConfig other = with_other_numbers(type);
        Strategy strategy = strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
          s.optimizer = other;
          s.gradient_clipping = 0;
        });
        if (by_hand) {
          strategy.optimizer = {.type = type, .lr = other.lr};
          if (has(type, optimizer_traits::kMomentum)) strategy.optimizer.momentum = 0.9;
        }
        Session session(mesh, strategy);
        if (by_hand) {
          Session wanted(mesh, strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) { s.optimizer = other; }));
          for (const auto& [name, numbers] : wanted.engine.options()) {
            numbers.size() == 1 ? session.engine.set_option(name, numbers[0])
                                : session.engine.set_option(name, {numbers[0], numbers[1]});
          }
          EXPECT_EQ(session.engine.options(), wanted.engine.options());
        }
        for (std::size_t i = 0; i < 4; ++i) session.train(i);
        EXPECT_TRUE(first.same_bits(mesh, session.values())) << name_of(type);
      });
    }
  }
}

// ---- Clipping by value ----------------------------------------------------------------------------------------------

TEST(ClipValue, EqualsPyTorchOnTheMeanGradient) {
  constexpr double kMost = 2e-3;
  const Rule rule = sgd();
  std::optional<Values> wanted;
  for (const std::int64_t microbatches : {1, 2}) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && microbatches > 1) continue;
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy);
            for (std::size_t i = 0; i < 6; ++i) {
              const at::Tensor tokens = rows_of(session.batches[i].tokens, mesh);
              const at::Tensor targets = rows_of(session.batches[i].targets, mesh);
              const std::int64_t rows = tokens.size(0) / microbatches;
              for (std::int64_t m = 0; m < microbatches; ++m) {
                session.engine.backward(
                    session.model->forward(tokens.narrow(0, m * rows, rows), targets.narrow(0, m * rows, rows)));
              }
              session.engine.step();
            }
            const Values values = session.values();
            if (mesh.rank() != 0) return;
            if (!wanted) {
              Tiny model = make_tiny({}, false);
              torch::optim::SGD optimizer(model->parameters(),
                                          torch::optim::SGDOptions(1e-1).momentum(0.9).nesterov(true));
              for (std::size_t i = 0; i < 6; ++i) {
                optimizer.zero_grad();
                model->forward(session.batches[i].tokens, session.batches[i].targets).backward();
                torch::nn::utils::clip_grad_value_(model->parameters(), kMost);
                optimizer.step();
              }
              wanted = values_of(*model);
            }
            expect_close(values, *wanted, 1e-5, std::to_string(microbatches) + " microbatches");
          },
          [&](Strategy& s) {
            with_rule(s, rule);
            s.optimizer.groups.clear();
            s.optimizer.weight_decay = 0;
            s.gradient_clip_value = kMost;
            s.gradient_accumulation = microbatches;
            s.optimizer.in_backward = in_backward;
          });
    }
  }
}

// ---- ReduceLROnPlateau ----------------------------------------------------------------------------------------------

/// Returns the rate after each measured value.
std::vector<double> rates(const std::vector<double>& measures, const ReduceLROnPlateau::Options& options) {
  std::vector<double> found;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) {
                      s.optimizer.lr = 0.8;
                      s.lr_schedule.type = LrScheduleType::kManual;
                    }));
    ReduceLROnPlateau plateau(session.engine, options);
    for (const double measure : measures) {
      const double before = session.engine.lr();
      const bool was_lowered = plateau.step(measure);
      EXPECT_EQ(was_lowered, session.engine.lr() != before);
      found.push_back(session.engine.lr());
    }
  });
  return found;
}

// The wanted rates are those of torch.optim.lr_scheduler.ReduceLROnPlateau in PyTorch 2.11.
TEST(ReduceLROnPlateau, FollowsPyTorch) {
  using Plateau = ReduceLROnPlateau;
  const std::vector<double> measures = {3,   2.5, 2.6, 2.5, 2.4999, 2.45, 2.6, 2.6,
                                        2.6, 2.6, 2.6, 2.2, NAN,    2.3,  2.3, 2.3};
  EXPECT_THAT(rates(measures, {.factor = 0.5, .patience = 1}),
              ElementsAre(0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025));
  EXPECT_THAT(rates(measures, {.factor = 0.5, .patience = 1, .cooldown = 2}),
              ElementsAre(0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1));
  EXPECT_THAT(rates(measures, {.factor = 0.5,
                               .patience = 0,
                               .threshold = 0.1,
                               .threshold_mode = Plateau::Threshold::kAbsolute,
                               .min_lr = 0.05}),
              ElementsAre(0.8, 0.8, 0.4, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05));
  std::vector<double> negative;
  for (const double measure : measures) negative.push_back(-measure);
  EXPECT_THAT(rates(negative, {.mode = Plateau::Mode::kMax, .factor = 0.25, .patience = 1, .eps = 0.02}),
              ElementsAre(0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05, 0.0125, 0.0125, 0.0125));
}

TEST(ReduceLROnPlateau, LoweredGroupRatesKeepTheirShares) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) {
                      s.optimizer.lr = 0.8;
                      s.lr_schedule.type = LrScheduleType::kManual;
                      s.optimizer.groups = {{.name = "vectors", .max_dim = 1, .lr_ratio = 0.5},
                                            {.name = "head", .match = {"head"}}};
                    }));
    Engine& engine = session.engine;
    engine.set_lr("head", 0.01);
    ReduceLROnPlateau plateau(engine, {.factor = 0.5, .patience = 0});
    EXPECT_FALSE(plateau.step(1.0));
    EXPECT_TRUE(plateau.step(1.0));
    EXPECT_EQ(engine.lr(), 0.4);
    EXPECT_EQ(engine.lr("vectors"), 0.2);
    EXPECT_EQ(engine.lr("head"), 0.005);
    EXPECT_EQ(session.train(0).lr, 0.4);
  });
}

TEST(ReduceLROnPlateau, FixedSchedulesAndWrongOptionsAreRefused) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard));
    EXPECT_THAT(usage_error_of([&] { ReduceLROnPlateau(session.engine); }), HasSubstr("\"manual\""));
    EXPECT_THAT(usage_error_of([&] { ReduceLROnPlateau(session.engine, {.factor = 1.5}); }),
                HasSubstr("above 0 and below 1"));
    EXPECT_THAT(usage_error_of([&] { session.engine.lr("hed"); }), HasSubstr("no group"));
    EXPECT_EQ(session.engine.lr(), session.engine.strategy().optimizer.lr);
  });
}

}  // namespace update_rules_test
}  // namespace tessera::testing
