// Tests parameter groups, and learning rates that the program sets. Numbers are those of PyTorch, and all strategies
// give the same bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <latch>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "optim/lr_schedule.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace parameter_groups_test {

using ::testing::HasSubstr;

constexpr std::size_t kSteps = 20;
constexpr TinyOptions kTied{.tied_head = true};

/// Returns two groups: vectors without decay, and matrices of blocks at a tenth of the rate. All other parameters are
/// the third kind.
std::vector<ParameterGroup> three_kinds() {
  ParameterGroup vectors{.name = "vectors", .max_dim = 1, .weight_decay = 0};
  ParameterGroup blocks{.name = "blocks", .match = {"blocks.*.up.weight", "blocks.*.down.weight"}, .lr_ratio = 0.1};
  blocks.weight_decay = 0.3;
  blocks.eps = 1e-2;
  blocks.betas = {0.8, 0.95};
  return {vectors, blocks};
}

void with_groups(Strategy& s) {
  s.optimizer.groups = three_kinds();
  s.optimizer.eps = 1e-3;  // eps is large, so that rounding errors of small gradients move no weight
  s.gradient_clipping = 0;
}

/// Returns the groups of three_kinds for PyTorch: [vectors, matrices of blocks, all others].
std::vector<torch::optim::OptimizerParamGroup> plain_groups(const Tiny& model, const OptimizerConfig& config) {
  const auto options = [&](double lr, double decay, double eps, std::tuple<double, double> betas) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(lr).weight_decay(decay).eps(eps).betas(betas));
  };
  std::vector<at::Tensor> kinds[3];
  for (const auto& item : model->named_parameters()) {
    const bool is_block = item.key().starts_with("blocks.");
    if (item.key() == "head" && model->options.tied_head) continue;
    kinds[item.value().dim() == 1 ? 0 : is_block ? 1 : 2].push_back(item.value());
  }
  const std::tuple<double, double> betas{config.beta1, config.beta2};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(kinds[0], options(config.lr, 0, config.eps, betas));
  groups.emplace_back(kinds[1], options(0.1 * config.lr, 0.3, 1e-2, {0.8, 0.95}));
  groups.emplace_back(kinds[2], options(config.lr, config.weight_decay, config.eps, betas));
  return groups;
}

/// Makes 20 steps of torch::optim::AdamW on the whole batch. Calls `adjust(step, optimizer)` before each step.
Values train_plainly(const TinyOptions& options, const Strategy& strategy,
                     const std::function<void(std::size_t, torch::optim::AdamW&)>& adjust = nullptr) {
  Tiny model = make_tiny(options, /*deferred=*/false);
  torch::optim::AdamW optimizer(plain_groups(model, strategy.optimizer));
  const auto batches = make_batches(6, 24, 5, options.vocab);
  for (std::size_t i = 0; i < kSteps; ++i) {
    if (adjust) adjust(i, optimizer);
    const Batch& batch = batches[i % batches.size()];
    optimizer.zero_grad();
    model->forward(batch.tokens, batch.targets).backward();
    optimizer.step();
  }
  return values_of(*model);
}

TEST(ParameterGroups, TrainingEqualsPyTorch) {
  for (const TinyOptions& model : {TinyOptions{}, kTied}) {
    std::optional<Values> wanted;
    for (const int ranks : {1, 2, 3}) {
      on_each_placement(
          ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, model);
            for (std::size_t i = 0; i < kSteps; ++i) session.train(i);
            const Values values = session.values();
            if (mesh.rank() != 0) return;
            if (!wanted) wanted = train_plainly(model, strategy);
            expect_close(values, *wanted, 1e-5, std::to_string(ranks) + " ranks");
          },
          with_groups);
    }
  }
}

TEST(ParameterGroups, HaveTheSameBitsUnderEveryStrategyAndFormat) {
  for (const Kept& kept : kKept) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && kept.param == DType::kF16) continue;
      FirstValues first;
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kAwkward);
            for (std::size_t i = 0; i < 5; ++i) session.train(i);
            EXPECT_TRUE(first.same_bits(mesh, session.values())) << name_of(kept);
          },
          [&](Strategy& s) {
            adjusted_to(kept, nullptr)(s);
            with_groups(s);
            s.optimizer.in_backward = in_backward;
          },
          kept.param);
    }
  }
}

// A group whose numbers are those of all parameters changes no results, even though it divides runs of elements.
TEST(ParameterGroups, GroupsOfEqualNumbersHaveTheBitsOfNoGroups) {
  const auto train = [](const Kept& kept, bool grouped) {
    return train_on_threads({.ranks = 2},
                            strategy_for(
                                ShardingStrategy::kFullShard,
                                [&](Strategy& s) {
                                  adjusted_to(kept, nullptr)(s);
                                  if (!grouped) return;
                                  const Tiny model = make_tiny({}, false);
                                  for (const auto& item : model->named_parameters())
                                    s.optimizer.groups.push_back({.match = {item.key()}});
                                },
                                kept.param),
                            {.model = {}, .steps = 5});
  };
  for (const Kept& kept : kKept) expect_same_bits(train(kept, true), train(kept, false), name_of(kept));
}

// Padding between the parameters of two groups lies in records too.
TEST(ParameterGroups, DiskTrafficEqualsThePlan) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const auto adjust = [](Strategy& s) {
        with_groups(s);
        put_below(s, {1, 1, 1, 4096, 0, 1});
      };
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust, dtype), kWide);
      expect_planned_disk_traffic(session, std::string(name_of(dtype)));
    });
  }
}

TEST(ParameterGroups, SgdGroupsHaveTheirOwnRateAndDecay) {
  const auto adjust = [](Strategy& s) {
    s.gradient_clipping = 0;
    s.optimizer.type = OptimizerType::kSgd;
    s.optimizer.weight_decay = 0.01;
    s.optimizer.momentum = 0.9;
    s.optimizer.groups = {{.match = {"*.bias"}, .lr_ratio = 2, .weight_decay = 0.0}};
  };
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 6; ++i) session.train(i);
        const Values values = session.values();
        if (mesh.rank() != 0) return;
        Tiny model = make_tiny({}, false);
        std::vector<at::Tensor> kinds[2];
        for (const auto& item : model->named_parameters()) {
          kinds[item.key().ends_with(".bias") ? 0 : 1].push_back(item.value());
        }
        const auto options = [&](double lr, double decay) {
          return std::make_unique<torch::optim::SGDOptions>(
              torch::optim::SGDOptions(lr).momentum(0.9).weight_decay(decay));
        };
        const OptimizerConfig& config = strategy.optimizer;
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(kinds[0], options(2 * config.lr, 0));
        groups.emplace_back(kinds[1], options(config.lr, config.weight_decay));
        torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1));
        for (std::size_t i = 0; i < 6; ++i) {
          optimizer.zero_grad();
          model->forward(session.batches[i].tokens, session.batches[i].targets).backward();
          optimizer.step();
        }
        expect_close(values, values_of(*model), 1e-5, "sgd");
      },
      adjust);
}

std::string refusal_of(const std::vector<ParameterGroup>& groups, OptimizerType type = OptimizerType::kAdamW) {
  return error_of(ExitCode::kConfig, [&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      const Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
                              s.optimizer.groups = groups;
                              s.optimizer.type = type;
                            }));
    });
  });
}

TEST(ParameterGroups, UnmatchedPatternsAndForeignOptionsAreRefused) {
  EXPECT_THAT(refusal_of({{.match = {"*.bais"}}}), HasSubstr("\"*.bais\" fits no parameter"));
  EXPECT_THAT(refusal_of({{.match = {"embeding.weight"}}}), HasSubstr("embedding.weight"));
  EXPECT_THAT(refusal_of({{.match = {"head"}, .max_dim = 1}}), HasSubstr("of at most 1 dimensions"));
  const std::string twice = refusal_of({{.name = "a", .match = {"*.bias"}}, {.match = {"blocks.0.*"}}});
  EXPECT_THAT(twice, HasSubstr("is in group 0 (a) and in group 1"));
  EXPECT_THAT(twice, HasSubstr("parameter blocks.0."));
  EXPECT_THAT(refusal_of({{.match = {}}}), HasSubstr("empty \"match\""));
  EXPECT_THAT(refusal_of({{.name = "a", .match = {"head"}}, {.name = "a", .match = {"*.bias"}}}),
              HasSubstr("named \"a\""));
  EXPECT_THAT(refusal_of({{.match = {"head"}, .eps = 1e-3}}, OptimizerType::kSgd),
              HasSubstr("has eps, which sgd does not have"));
  EXPECT_THAT(refusal_of({{.match = {"head"}, .betas = {{0.9, 0.9}}}}, OptimizerType::kRmsprop),
              HasSubstr("has betas, which rmsprop does not have"));
}

// ---- Rates set by hand ----------------------------------------------------------------------------------------------

double rate_at(std::size_t step) { return 1e-2 / (1.0 + 0.3 * static_cast<double>(step)); }

void by_hand(Strategy& s) {
  with_groups(s);
  s.lr_schedule.type = LrScheduleType::kManual;
}

TEST(SetLr, RatesOfAllAndOfAGroupEqualPyTorch) {
  std::optional<Values> wanted;
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < kSteps; ++i) {
          session.engine.set_lr(rate_at(i));
          if (i % 2 == 1) session.engine.set_lr("blocks", 3e-3);
          EXPECT_EQ(session.train(i).lr, rate_at(i));
        }
        const Values values = session.values();
        if (mesh.rank() != 0) return;
        if (!wanted) {
          wanted = train_plainly({}, strategy, [](std::size_t i, torch::optim::AdamW& optimizer) {
            auto& groups = optimizer.param_groups();
            for (auto& group : groups) group.options().set_lr(rate_at(i));
            groups[1].options().set_lr(i % 2 == 1 ? 3e-3 : 0.1 * rate_at(i));
          });
        }
        expect_close(values, *wanted, 1e-5, "by hand");
      },
      by_hand);
}

TEST(SetLr, RatesSetByHandHaveTheBitsOfTheSchedule) {
  LrScheduleConfig cosine;
  cosine.type = LrScheduleType::kCosine;
  cosine.warmup_steps = 2, cosine.total_steps = 8;
  for (const bool in_backward : {false, true}) {
    FirstValues first;
    for (const bool manual : {false, true}) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Strategy strategy = strategy_for(ShardingStrategy::kFullShard, manual ? by_hand : with_groups);
        strategy.optimizer.in_backward = in_backward;
        if (!manual) strategy.lr_schedule = cosine;
        Session session(mesh, strategy);
        for (std::int64_t i = 0; i < 8; ++i) {
          if (manual) session.engine.set_lr(lr_at(cosine, strategy.optimizer.lr, i, 0));
          session.train(static_cast<std::size_t>(i));
        }
        EXPECT_TRUE(first.same_bits(mesh, session.values())) << in_backward;
      });
    }
  }
}

TEST(SetLr, RateStaysWhenFreezingChanges) {
  FirstValues first;
  for (const bool replans : {false, true}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, by_hand), {.unused_block = true});
      session.engine.set_lr(3e-3);
      session.engine.set_lr("vectors", 1e-3);
      session.train(0);
      const std::string unused = "blocks." + std::to_string(session.model->blocks->size() - 1) + ".*";
      if (replans) session.engine.set_trainable(unused, false);
      if (replans) session.engine.set_trainable(unused, true);
      for (std::size_t i = 1; i < 4; ++i) session.train(i);
      EXPECT_TRUE(first.same_bits(mesh, session.values()));
    });
  }
}

TEST(SetLr, WrongCallsAreRefusedAndHarmless) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        Engine& engine = session.engine;
        EXPECT_THAT(usage_error_of([&] { engine.set_lr("vector", 1e-3); }), HasSubstr("did you mean \"vectors\"?"));
        EXPECT_THAT(usage_error_of([&] { engine.set_lr("", 1e-3); }), HasSubstr("an empty one"));
        for (const double wrong : {-1.0, std::nan(""), HUGE_VAL, 2000.0})
          EXPECT_THAT(usage_error_of([&] { engine.set_lr(wrong); }), HasSubstr("from 0 to 1000"));
        session.train(0);
        engine.backward(session.loss(1));
        engine.set_lr(2e-3);  // a rate set between backward and step counts at once
        EXPECT_EQ(engine.step().lr, 2e-3);
      },
      by_hand);
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_lr(1e-3); }), HasSubstr("\"manual\""));
    session.train(0);
  });
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) {
                      by_hand(s);
                      s.optimizer.in_backward = true;
                    }));
    session.engine.backward(session.loss(0));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_lr(1e-3); }), HasSubstr("in_backward"));
    session.engine.step();
  });
}

TEST(SetLr, DifferentRatesOnRanksAreNamedAtTheStep) {
  for (const std::string group : {"", "blocks"}) {
    const std::string told = error_of([&] {
      run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kShardGradients, by_hand));
        session.train(0);
        const double lr = mesh.rank() == 2 ? 2e-3 : 1e-3;
        group.empty() ? session.engine.set_lr(lr) : session.engine.set_lr(group, lr);
        session.train(1);
      });
    });
    EXPECT_THAT(told, HasSubstr("set_lr: ranks have different learning rates"));
    EXPECT_THAT(told, HasSubstr("on rank 2"));
  }
}

// The ranks of a replica that trains apart compare their rates only with each other. The message names ranks by their
// numbers in the job.
TEST(SetLr, DifferentRatesInAReplicaThatTrainsApartNameTheRanksOfTheJob) {
  std::string told[4];
  std::latch second_replica_has_ended(2);
  try {
    run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [](Strategy& s) {
                        by_hand(s);
                        s.mesh = {2, 2};
                        s.sync.type = SyncType::kLocalSgd;
                        s.sync.every = 100;
                      }));
      session.train(0);
      if (mesh.rank() < 2) {
        second_replica_has_ended.wait();
        throw std::runtime_error("the other replica has ended");
      }
      session.engine.set_lr(mesh.rank() == 3 ? 2e-3 : 1e-3);
      try {
        session.train(1);
      } catch (const Error& error) {
        told[mesh.rank()] = error.message();
      }
      second_replica_has_ended.count_down();
    });
  } catch (const std::exception&) {  // how every rank ended is checked below
  }
  const std::string both = told[2] + told[3];  // one of the two ranks may only learn of the other's end
  EXPECT_THAT(both, HasSubstr("set_lr: ranks have different learning rates"));
  EXPECT_THAT(both, HasSubstr("on rank 2"));
  EXPECT_THAT(both, HasSubstr("on rank 3"));
}

// ---- Groups that come while training --------------------------------------------------------------------------------

constexpr TinyOptions kFrozen{.frozen_first_block = true};

void without_groups(Strategy& s) {
  by_hand(s);
  s.optimizer.groups.clear();
}

/// Trains the first block from step 3 on at half the rate, and from step 6 on at its own rate.
Values train_plainly_with_added_group(const OptimizerConfig& config) {
  Tiny model = make_tiny(kFrozen, /*deferred=*/false);
  const auto options = [&](double lr, double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(lr).weight_decay(decay).eps(config.eps).betas({config.beta1, config.beta2}));
  };
  std::vector<at::Tensor> first, others;
  for (const auto& item : model->named_parameters())
    (item.key().starts_with("blocks.0.") ? first : others).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(others, options(config.lr, config.weight_decay));
  torch::optim::AdamW optimizer(groups);
  const auto batches = make_batches(6, 24, 5, kFrozen.vocab);
  for (std::size_t i = 0; i < 8; ++i) {
    if (i == 3) {
      for (at::Tensor& parameter : first) parameter.requires_grad_(true);
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(first, options(0.5 * config.lr, 0.25)));
    }
    if (i == 6) optimizer.param_groups()[1].options().set_lr(2e-3);
    optimizer.zero_grad();
    model->forward(batches[i % 6].tokens, batches[i % 6].targets).backward();
    optimizer.step();
  }
  return values_of(*model);
}

TEST(AddGroup, AddedGroupEqualsPyTorch) {
  std::optional<Values> wanted;
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy, kFrozen);
        const Strategy& before = session.engine.strategy();
        for (std::size_t i = 0; i < 8; ++i) {
          if (i == 3)
            session.engine.add_group({.name = "first", .match = {"blocks.0.*"}, .lr_ratio = 0.5, .weight_decay = 0.25});
          if (i == 6) session.engine.set_lr("first", 2e-3);
          session.train(i);
        }
        EXPECT_EQ(session.engine.strategy().optimizer.groups.size(), 1u);
        EXPECT_TRUE(before.optimizer.groups.empty());
        const Values values = session.values();
        if (mesh.rank() != 0) return;
        if (!wanted) wanted = train_plainly_with_added_group(strategy.optimizer);
        expect_close(values, *wanted, 1e-5, "a group that came");
      },
      without_groups);
}

TEST(AddGroup, WrongGroupIsRefusedAndHarmless) {
  FirstValues first;
  for (const bool tries : {false, true}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, with_groups));
      session.train(0);
      const auto refused = [&](const ParameterGroup& group) -> std::string {
        return error_of(ExitCode::kConfig, [&] { session.engine.add_group(group); });
      };
      if (tries) {
        EXPECT_THAT(refused({.match = {"hed"}}), HasSubstr("fits no parameter"));
        EXPECT_THAT(refused({.match = {"head", "*.bias"}}), HasSubstr("is in group 0 (vectors) and in group 2"));
        EXPECT_THAT(refused({.name = "blocks", .match = {"head"}}), HasSubstr("two groups are named"));
        session.engine.backward(session.loss(1));
        EXPECT_THAT(usage_error_of([&] { session.engine.add_group({.match = {"head"}}); }), HasSubstr("step()"));
        session.engine.step();
      } else {
        session.train(1);
      }
      for (std::size_t i = 2; i < 4; ++i) session.train(i);
      EXPECT_TRUE(first.same_bits(mesh, session.values()));
    });
  }
}

// ---- Numbers of the update rule set by hand -------------------------------------------------------------------------

double share(std::size_t step) { return static_cast<double>(step + 1) / static_cast<double>(kSteps); }

TEST(SetOption, OptionsOfAllAndOfAGroupEqualPyTorch) {
  std::optional<Values> wanted;
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        Engine& engine = session.engine;
        for (std::size_t i = 0; i < kSteps; ++i) {
          engine.set_option("weight_decay", 2 * share(i));
          engine.set_option("betas", {0.9 - 0.2 * share(i), 0.99});
          if (i % 2 == 1) engine.set_option("blocks", "weight_decay", share(i));
          if (i == 5) engine.set_option("blocks", "betas", {0.7, 0.98});
          engine.set_option("vectors", "eps", 1e-2 * share(i));
          session.train(i);
        }
        EXPECT_EQ(engine.options("blocks").at("betas"), (std::vector<double>{0.7, 0.98}));
        // the strategy gives this group its own value
        EXPECT_EQ(engine.options("vectors").at("weight_decay"), std::vector<double>{0});
        const Values values = session.values();
        if (mesh.rank() != 0) return;
        if (!wanted) {
          wanted = train_plainly({}, strategy, [](std::size_t i, torch::optim::AdamW& optimizer) {
            const auto of = [&](std::size_t group) -> torch::optim::AdamWOptions& {
              return static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[group].options());
            };
            of(2).weight_decay(2 * share(i));
            for (const std::size_t group : {0, 2}) of(group).betas({0.9 - 0.2 * share(i), 0.99});
            if (i % 2 == 1) of(1).weight_decay(share(i));
            if (i == 5) of(1).betas({0.7, 0.98});
            of(0).eps(1e-2 * share(i));
          });
        }
        expect_close(values, *wanted, 1e-5, "by hand");
      },
      with_groups);
}

TEST(SetOption, OptionStaysAfterFreezingAndInACheckpoint) {
  FirstValues first;
  for (const bool breaks : {false, true}) {
    const TestFolder folder;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, with_groups);
      std::optional<Session> session(std::in_place, mesh, strategy, TinyOptions{.unused_block = true});
      session->engine.set_option("weight_decay", 0.2);
      session->engine.set_option("blocks", "eps", 0.1);
      session->train(0);
      const std::string unused = "blocks." + std::to_string(session->model->blocks->size() - 1) + ".*";
      if (breaks) session->engine.set_trainable(unused, false);
      session->train(1);
      if (breaks) {
        session->engine.set_trainable(unused, true);
        save_checkpoint(session->engine, folder.path().string());
        session.reset();
        session.emplace(mesh, strategy, TinyOptions{.unused_block = true});
        load_checkpoint(session->engine, folder.path().string());
      }
      for (std::size_t i = 2; i < 4; ++i) session->train(i);
      EXPECT_EQ(session->engine.options("blocks").at("eps"), std::vector<double>{0.1});
      EXPECT_TRUE(first.same_bits(mesh, session->values()));
    });
  }
}

TEST(SetOption, WrongCallsAreRefusedAndHarmless) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) {
                      with_groups(s);
                      s.optimizer.in_backward = true;
                    }));
    Engine& engine = session.engine;
    const auto refused = [&](const auto&... arguments) {
      return usage_error_of([&] { engine.set_option(arguments...); });
    };
    EXPECT_THAT(refused("weight_deca", 0.1), HasSubstr("did you mean \"weight_decay\"?"));
    EXPECT_THAT(refused("momentum", 0.1), HasSubstr("hint: known here: weight_decay, eps, betas"));
    EXPECT_THAT(refused("lr", 0.1), HasSubstr("set_lr"));
    EXPECT_THAT(refused("betas", 0.9), HasSubstr("wants 2 numbers, got 1"));
    EXPECT_THAT(refused("eps", std::pair(0.1, 0.1)), HasSubstr("wants 1 number, got 2"));
    EXPECT_THAT(refused("betas", std::pair(0.9, 1.0)), HasSubstr("from 0 to below 1, got 1"));
    EXPECT_THAT(refused("weight_decay", std::nan("")), HasSubstr("from 0 to 1000"));
    EXPECT_THAT(refused("block", "eps", 0.1), HasSubstr("did you mean \"blocks\"?"));
    session.train(0);
    engine.backward(session.loss(1));
    EXPECT_THAT(refused("eps", 0.1), HasSubstr("in_backward"));
    engine.step();
  });
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(
        mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) { s.optimizer.type = OptimizerType::kSgd; }));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_option("momentum", 0.9); }), HasSubstr("has no memory"));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_option("nesterov", 2); }), HasSubstr("0 or 1"));
    session.engine.set_option("momentum", 0);
    session.train(0);
  });
}

TEST(SetOption, DifferentOptionsOnRanksAreNamedAtTheStep) {
  const std::string told = error_of([&] {
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kShardGradients, with_groups));
      session.train(0);
      if (mesh.rank() == 2) session.engine.set_option("blocks", "eps", 0.25);
      session.train(1);
    });
  });
  EXPECT_THAT(told, HasSubstr("set_option: ranks have different options: eps of group 1 (blocks) is "));
  EXPECT_THAT(told, HasSubstr("0.25 on rank 2"));
}

}  // namespace parameter_groups_test
}  // namespace tessera::testing
