// Tests "sync": {"type": "hogwild"}: ranks read and update one copy of the parameters at the same time.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "sharding/partition.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/sync_batch_norm.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace hogwild_test {

using ::testing::HasSubstr;

Strategy hogwild(const Adjust& adjust = nullptr) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0;
  strategy.sync = {.type = SyncType::kHogwild};
  if (adjust) adjust(strategy);
  return strategy;
}

void shared_states(Strategy& s) { s.sync.asynchronous.states = StateSharing::kShared; }
void sgd(Strategy& s) { s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0}; }
void momentum(Strategy& s) {
  sgd(s);
  s.optimizer.momentum = 0.9;
}
void adagrad(Strategy& s) { s.optimizer = {.type = OptimizerType::kAdagrad, .lr = 0.05, .weight_decay = 0}; }

/// Returns the tested rules. Each rule is listed twice: with states that each rank has for itself, and with shared
/// states.
std::vector<std::pair<std::string, Strategy>> all_rules() {
  std::vector<std::pair<std::string, Strategy>> all;
  const std::pair<const char*, Adjust> rules[] = {
      {"sgd", sgd}, {"momentum", momentum}, {"adagrad", adagrad}, {"adamw", nullptr}};
  for (const auto& [name, adjust] : rules) {
    all.emplace_back(name, hogwild(adjust));
    all.emplace_back(std::string(name) + ", shared states", hogwild(adjust));
    shared_states(all.back().second);
  }
  return all;
}

struct Ran {
  std::vector<std::vector<StepResult>> steps;  ///< the results of each rank
  Values values;                               ///< the values when all ranks have ended
};

Ran run(int ranks, const Strategy& strategy, std::size_t steps) {
  Ran result;
  result.steps.resize(static_cast<std::size_t>(ranks));
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    auto& own = result.steps[static_cast<std::size_t>(mesh.rank())];
    for (std::size_t i = 0; i < steps; ++i) own.push_back(session.train(i));
    barrier(mesh);
    if (mesh.rank() == 0) result.values = session.values();
    barrier(mesh);
  });
  return result;
}

std::vector<double> losses_of(const std::vector<StepResult>& steps) {
  std::vector<double> losses;
  for (const StepResult& step : steps) losses.push_back(step.loss);
  return losses;
}

TEST(Hogwild, OneRankHasTheBitsOfPlainLibTorch) {
  at::set_num_threads(1);
  constexpr std::int64_t kSteps = 6;
  for (const auto& [name, strategy] : all_rules()) {
    SCOPED_TRACE(name);
    std::vector<OrderLine> order;
    Tiny model = make_tiny({}, false);
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      for (const bool is_push : {false, true}) {
        for (const auto& unit : partition(*model, strategy, 1)) {
          for (const auto& group : unit->groups)
            order.push_back(
                {.step = step, .version = step - 1, .group = group->index, .unit = unit->name, .is_push = is_push});
        }
      }
    }
    OrderOracle oracle(strategy, 1);
    oracle.play(order);
    const Ran got = run(1, strategy, kSteps);
    EXPECT_EQ(losses_of(got.steps[0]), oracle.losses()[0]);
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
  }
}

TEST(Hogwild, OneRankHasTheBitsOfSynchronousTraining) {
  for (const auto& [name, given] : all_rules()) {
    SCOPED_TRACE(name);
    Strategy strategy = given;
    strategy.gradient_clipping = 0.5;
    strategy.gradient_accumulation = 2;
    const Ran got = run(1, strategy, 4);
    strategy.sync = {};
    const Ran wanted = run(1, strategy, 4);
    EXPECT_EQ(losses_of(got.steps[0]), losses_of(wanted.steps[0]));
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
    for (const StepResult& step : got.steps[0]) EXPECT_EQ(step.staleness_max, 0);
  }
}

TEST(Hogwild, StepsOfSeveralRanksSpendNoTimeInCommunication) {
  const Ran got = run(2, hogwild(), 3);
  for (const std::vector<StepResult>& steps : got.steps) {
    ASSERT_EQ(steps.size(), 3U);
    for (const StepResult& step : steps) EXPECT_EQ(step.communication_seconds, 0);
  }
}

/// Returns the mean loss of the last six steps, in which each batch comes once.
double last_loss(const Ran& ran) {
  double sum = 0;
  for (const std::vector<StepResult>& steps : ran.steps) {
    for (std::size_t i = steps.size() - 6; i < steps.size(); ++i) sum += steps[i].loss / 6;
  }
  return sum / static_cast<double>(ran.steps.size());
}

// N ranks make N updates in the time of one synchronous step, each with the gradient of 1 / N of the batch. The loss
// after K steps of each rank therefore lies between the losses of K and of N K synchronous steps. The tolerance is half
// of the decrease of the loss in the synchronous run. It covers the order of ranks (which depends on the machine), lost
// updates, and a shared momentum.
TEST(Hogwild, LossOfSeveralRanksLiesBetweenThatOfFewerAndMoreSynchronousSteps) {
  constexpr int kRanks = 2;
  constexpr std::size_t kSteps = 60;
  for (const auto& [name, given] : all_rules()) {
    SCOPED_TRACE(name);
    Strategy strategy = given;
    const double got = last_loss(run(kRanks, strategy, kSteps));
    strategy.sync = {};
    const Ran fewer = run(kRanks, strategy, kSteps);
    const double first = fewer.steps[0][0].loss, slow = last_loss(fewer),
                 fast = last_loss(run(kRanks, strategy, kRanks * kSteps));
    EXPECT_LT(got, slow + 0.5 * (first - slow));
    EXPECT_GT(got, fast - 0.5 * (first - fast));
  }
}

TEST(Hogwild, MemoryEqualsThePlan) {
  for (const auto& [name, strategy] : all_rules()) {
    SCOPED_TRACE(name);
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      const StepResult result = session.train(0);
      EXPECT_EQ(result.planned, result.allocated);
      EXPECT_EQ(plan_memory(*session.model, strategy, mesh.topology()).use, result.planned);
      barrier(mesh);
    });
  }
}

TEST(Hogwild, CheckpointOfSeveralRanksHasTheirValuesAndGoesOn) {
  for (const auto& [name, strategy] : all_rules()) {
    SCOPED_TRACE(name);
    const TestFolder folder;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Values wanted;
      {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
        barrier(mesh);
        wanted = session.values();
        barrier(mesh);
      }
      Session session(mesh, strategy);
      load_checkpoint(session.engine, folder.path());
      EXPECT_TRUE(all_same_bits(session.values(), wanted));
      barrier(mesh);
      EXPECT_TRUE(std::isfinite(session.train(3).loss));
      barrier(mesh);
    });
  }
}

TEST(Hogwild, CheckpointOfOneRankResumesWithTheSameBits) {
  for (const auto& [name, strategy] : all_rules()) {
    SCOPED_TRACE(name);
    const TestFolder folder;
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Values wanted;
      {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
        for (std::size_t i = 3; i < 6; ++i) session.train(i);
        wanted = session.values();
      }
      Session session(mesh, strategy);
      load_checkpoint(session.engine, folder.path());
      for (std::size_t i = 3; i < 6; ++i) session.train(i);
      EXPECT_TRUE(all_same_bits(session.values(), wanted));
    });
  }
}

TEST(Hogwild, WriteUnderAGuardReachesAllRanks) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, hogwild(momentum));
    session.train(0);
    {
      const Gathered guard(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_grad;
      for (auto& parameter : session.model->parameters()) parameter.fill_(0.25);
    }
    for (const auto& [name, value] : session.values()) EXPECT_TRUE((value == 0.25).all().item<bool>()) << name;
    barrier(mesh);
    session.train(1);
    barrier(mesh);
  });
}

// Each rank looks up rows of its own. A row's gradient depends on that row alone, so each row has the same bits as in a
// plain run of its rank, unless another rank writes the row.
TEST(Hogwild, RanksTouchOnlyTheRowsOfAnEmbeddingThatTheyUse) {
  constexpr std::int64_t kRows = 64, kWidth = 9, kSteps = 200;
  constexpr int kRanks = 2;
  const auto rows_of_rank = [](int rank, std::int64_t step) {
    return at::arange(4) * 4 * kRanks + (step % 4) * kRanks + rank;  // neighbours belong to different ranks
  };
  for (const bool sparse : {false, true}) {
    for (const Adjust& adjust : {Adjust(sgd), Adjust(adagrad)}) {
      const auto options = torch::nn::EmbeddingOptions(kRows, kWidth).sparse(sparse);
      const auto loss_of = [&](torch::nn::Embedding& table, int rank, std::int64_t step) {
        return (table->forward(rows_of_rank(rank, step)) - 0.5).square().sum();
      };
      std::vector<at::Tensor> ends(kRanks);
      torch::manual_seed(5);
      torch::nn::Embedding plain(options);
      const at::Tensor begin = plain->weight.detach().clone();
      run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
        torch::nn::Embedding table(options);
        {
          const at::NoGradGuard no_grad;
          table->weight.copy_(begin);
        }
        Strategy strategy = hogwild(adjust);
        strategy.optimizer.lr = 0.01;
        strategy.units.classes = {"Embedding"};
        Engine engine(table.ptr(), strategy, mesh);
        for (std::int64_t step = 0; step < kSteps; ++step) {
          engine.backward(loss_of(table, mesh.rank(), step));
          engine.step();
        }
        barrier(mesh);
        ends[static_cast<std::size_t>(mesh.rank())] = table->weight.detach().clone();
        barrier(mesh);
      });
      EXPECT_TRUE(ends[0].equal(ends[1]));
      for (int rank = 0; rank < kRanks; ++rank) {
        run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
          torch::nn::Embedding table(options);
          {
            const at::NoGradGuard no_grad;
            table->weight.copy_(begin);
          }
          Strategy strategy = hogwild(adjust);
          strategy.optimizer.lr = 0.01;
          strategy.units.classes = {"Embedding"};
          strategy.sync = {};
          Engine engine(table.ptr(), strategy, mesh);
          for (std::int64_t step = 0; step < kSteps; ++step) {
            engine.backward(loss_of(table, rank, step));
            engine.step();
          }
          const at::Tensor rows = at::arange(kRows / kRanks) * kRanks + rank;
          EXPECT_TRUE(table->weight.detach().index_select(0, rows).equal(ends[0].index_select(0, rows))) << rank;
        });
      }
      EXPECT_FALSE(ends[0].slice(0, 0, 32).equal(begin.slice(0, 0, 32)));
      EXPECT_TRUE(ends[0].slice(0, 32).equal(begin.slice(0, 32))) << "nobody looked these rows up";
    }
  }
}

TEST(Hogwild, UnsupportedKeysBesideHogwildAreRefused) {
  const auto error_with = [](const std::string& more) {
    return error_of(
        [&] { Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "hogwild"}, )" + more + "}"); });
  };
  const std::pair<const char*, const char*> refused[] = {
      {R"("optimizer": {"type": "muon"})", "optimizer.type muon"},
      {R"("optimizer": {"state_dtype": "bf16"})", "state_dtype bf16 or 8bit"},
      {R"("mixed_precision": {"param": "bf16"})", "param bf16 or fp16"},
      {R"("ema": {"decay": 0.9})", "ema"},
      {R"("durable": {"every": 1, "dir": "d"})", "durable"},
      {R"("comm": {"transport": "gloo"})", "comm.transport gloo"},
      {R"("host_sharing": false)", "host_sharing false"},
      {R"("check": {"values": true})", "check.values"},
      {R"("check": {"as_across_hosts": true})", "check.as_across_hosts"}};
  for (const auto& [with, named] : refused) {
    EXPECT_THAT(error_with(with), HasSubstr("hogwild cannot stand beside")) << with;
    EXPECT_THAT(error_with(with), HasSubstr(named)) << with;
  }
  const auto error_of_centered = [](const std::string& states) {
    return error_of([&] {
      Strategy::from_json(
          std::string(R"({"strategy": "SHARD_OPTIMIZER", "optimizer": {"type": "rmsprop", "centered": true}, )") +
          R"("sync": {"type": "hogwild", "states": ")" + states + R"("}})");
    });
  };
  EXPECT_THAT(error_of_centered("shared"),
              HasSubstr("hogwild cannot stand beside optimizer.centered where sync.states is shared"));
  EXPECT_EQ(error_of_centered("own"), "");
  EXPECT_EQ(error_with(R"("gradient_clipping": 1.0)"), "");
  EXPECT_THAT(error_of([] { Strategy::from_json(R"({"sync": {"type": "hogwild"}})"); }),
              HasSubstr("hogwild needs \"strategy\" \"SHARD_OPTIMIZER\""));
  for (const char* key : {R"("max_staleness": 1)", R"("scale": "inverse")", R"("record_order": "a")"}) {
    const std::string sync = R"({"type": "hogwild", )" + std::string(key) + "}";
    EXPECT_THAT(error_of([&] { Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": )" + sync + "}"); }),
                HasSubstr("sync.type asynchronous"))
        << key;
  }
  EXPECT_THAT(
      error_of([] {
        Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "states": "shared"}})");
      }),
      HasSubstr("sync.type hogwild"));
}

}  // namespace hogwild_test
}  // namespace tessera::testing
