// Trains LibTorch's own modules, unmodified, in shards. They get the same values as without shards.

#include <ATen/Parallel.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/optim/adamw.h>

#include <mutex>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "tests/support/small_models.h"
#include "workshop/models/resnet.h"

namespace tessera::testing {
namespace modules_test {

using namespace torch::nn;
constexpr std::int64_t kSteps = 5, kBatches = 2,
                       kBatch = 6;  // the last step sees the first step's batch again

/// A module, its units, and the task that it learns. Examples are rows of inputs [kBatches][kBatch, ...]. A loss is the
/// mean over the rows that it gets.
struct Problem {
  const char* name;
  std::vector<std::string> units;
  std::vector<std::int64_t> row;
  std::function<std::shared_ptr<Module>()> make;
  std::function<at::Tensor(Module&, const at::Tensor& rows)> loss;
};

std::ostream& operator<<(std::ostream& out, const Problem& problem) { return out << problem.name; }

// ---- the modules -------------------------------------------------------------------------------------------------

std::shared_ptr<Module> make_transformer() {
  return Transformer(TransformerOptions(16, 2, 2, 2).dim_feedforward(23).dropout(0)).ptr();
}

/// rows: [B, 9, 16]. The encoder gets the first 5 vectors, and the decoder gets the other 4.
at::Tensor transformer_loss(Module& module, const at::Tensor& rows) {
  const at::Tensor all = rows.transpose(0, 1);
  const at::Tensor made = module.as<TransformerImpl>()->forward(all.narrow(0, 0, 5), all.narrow(0, 5, 4));
  return at::mse_loss(made, all.narrow(0, 1, 4));
}

struct RecurrentImpl : Module {
  RecurrentImpl() : lstm(LSTMOptions(7, 11).num_layers(2).bidirectional(true).batch_first(true)), head(22, 7) {
    register_module("lstm", lstm);
    register_module("head", head);
  }
  LSTM lstm;
  Linear head;
};

/// rows: [B, 6, 7]. The loss compares each step's output with the previous step's vector.
at::Tensor recurrent_loss(Module& module, const at::Tensor& rows) {
  auto& model = *module.as<RecurrentImpl>();
  return at::mse_loss(model.head(std::get<0>(model.lstm(rows))), rows.roll(1, 1));
}

/// A module with attention, a GRU, a convolution with group norm and PReLU, and a bilinear layer. Each of these has
/// another kind of parameters.
struct AssortmentImpl : Module {
  AssortmentImpl()
      : attention(MultiheadAttentionOptions(8, 2)),
        gru(GRUOptions(8, 8).batch_first(true)),
        conv(Conv1dOptions(8, 8, 3).padding(1)),
        norm(GroupNormOptions(2, 8)),
        prelu(PReLUOptions().num_parameters(8)),
        bilinear(BilinearOptions(8, 8, 5)) {
    register_module("attention", attention);
    register_module("gru", gru);
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("prelu", prelu);
    register_module("bilinear", bilinear);
  }
  MultiheadAttention attention;
  GRU gru;
  Conv1d conv;
  GroupNorm norm;
  PReLU prelu;
  Bilinear bilinear;
};

/// rows: [B, 5, 8].
at::Tensor assortment_loss(Module& module, const at::Tensor& rows) {
  auto& model = *module.as<AssortmentImpl>();
  const at::Tensor by_time = rows.transpose(0, 1);
  const at::Tensor seen = std::get<0>(model.attention(by_time, by_time, by_time)).transpose(0, 1);
  const at::Tensor heard = std::get<0>(model.gru(seen));
  const at::Tensor felt = model.prelu(model.norm(model.conv(heard.transpose(1, 2)))).transpose(1, 2).contiguous();
  return at::mse_loss(model.bilinear(felt, heard.contiguous()), rows.narrow(2, 0, 5));
}

std::vector<Problem> problems() {
  return {{"Transformer",
           {"TransformerEncoderLayer", "TransformerDecoderLayer"},
           {9, 16},
           make_transformer,
           transformer_loss},
          {"Recurrent", {"LSTM"}, {6, 7}, [] { return std::make_shared<RecurrentImpl>(); }, recurrent_loss},
          {"Assortment",
           {"MultiheadAttention", "GRU", "Conv1d", "GroupNorm", "PReLU", "Bilinear"},
           {5, 8},
           [] { return std::make_shared<AssortmentImpl>(); },
           assortment_loss}};
}

// ---- training ----------------------------------------------------------------------------------------------------

struct Trained {
  std::vector<double> losses;
  std::vector<std::pair<std::string, at::Tensor>> values, buffers;
};

/// Makes the module from a fixed seed. Ranks are threads and share the generator, so only one rank makes it at a time.
std::shared_ptr<Module> make_seeded(const std::function<std::shared_ptr<Module>()>& make, bool deferred) {
  static std::mutex generator_mutex;
  const std::lock_guard lock(generator_mutex);
  at::manual_seed(99);
  return deferred ? deferred_init(make) : make();
}

at::Tensor inputs_of(const Problem& problem) {
  static std::mutex generator_mutex;
  const std::lock_guard lock(generator_mutex);
  std::vector<std::int64_t> sizes = {kBatches, kBatch};
  sizes.insert(sizes.end(), problem.row.begin(), problem.row.end());
  at::manual_seed(3);
  return at::randn(sizes);
}

void keep_state(const Module& module, Trained& trained) {
  trained.values = values_of(module);
  for (const auto& item : module.named_buffers()) trained.buffers.emplace_back(item.key(), item.value().clone());
}

Trained train_on(const Mesh& mesh, const Problem& problem, const at::Tensor& inputs, const Strategy& strategy) {
  at::set_num_threads(1);
  const auto module = make_seeded(problem.make, /*deferred=*/true);
  Engine engine(module, strategy, mesh);
  const std::int64_t share = kBatch / mesh.world_size();
  Trained trained;
  for (std::int64_t i = 0; i < kSteps; ++i) {
    engine.backward(problem.loss(*module, inputs[i % kBatches].narrow(0, mesh.rank() * share, share)));
    const StepResult result = engine.step();
    EXPECT_EQ(result.planned, result.allocated);
    trained.losses.push_back(result.loss);
  }
  EXPECT_EQ(engine.traffic().overflow_slots, 0);
  const Gathered gathered(engine);
  keep_state(*module, trained);
  return trained;
}

std::vector<Trained> train_on_threads(int ranks, const Problem& problem, ShardingStrategy kind) {
  Strategy strategy;
  strategy.strategy = kind;
  strategy.units.classes = problem.units;
  strategy.optimizer.lr = 1e-2;
  const at::Tensor inputs = inputs_of(problem);
  std::vector<Trained> all(ranks);
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { all[mesh.rank()] = train_on(mesh, problem, inputs, strategy); });
  return all;
}

Trained train_plainly(const Problem& problem) {
  at::set_num_threads(1);
  const auto module = make_seeded(problem.make, /*deferred=*/false);
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  const at::Tensor inputs = inputs_of(problem);
  Trained trained;
  for (std::int64_t i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    const at::Tensor loss = problem.loss(*module, inputs[i % kBatches]);
    loss.backward();
    optimizer.step();
    trained.losses.push_back(loss.item<double>());
  }
  keep_state(*module, trained);
  return trained;
}

void expect_close(const Trained& got, const Trained& wanted) {
  for (std::int64_t i = 0; i < kSteps; ++i) EXPECT_NEAR(got.losses[i], wanted.losses[i], 1e-4) << "step " << i;
  ASSERT_EQ(got.values.size(), wanted.values.size());
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    EXPECT_EQ(got.values[i].first, wanted.values[i].first);
    // Adam makes a step of lr even if a gradient consists only of rounding errors: see strategies_test.cc.
    EXPECT_LT((got.values[i].second - wanted.values[i].second).abs().max().item<double>(), 5e-3) << got.values[i].first;
  }
}

void expect_same_bits(const Trained& got, const Trained& wanted, const std::string& what) {
  EXPECT_EQ(got.losses, wanted.losses) << what;
  for (const auto& [mine, theirs] :
       {std::pair(&got.values, &wanted.values), std::pair(&got.buffers, &wanted.buffers)}) {
    ASSERT_EQ(mine->size(), theirs->size()) << what;
    for (std::size_t i = 0; i < mine->size(); ++i) {
      EXPECT_TRUE(same_bits((*mine)[i].second, (*theirs)[i].second)) << what << ", " << (*mine)[i].first;
    }
  }
}

class Modules : public ::testing::TestWithParam<Problem> {};

TEST_P(Modules, ShardedTrainingEqualsUnsharded) {
  const Trained plain = train_plainly(GetParam());
  EXPECT_LT(plain.losses.back(), plain.losses.front());
  for (int ranks : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const std::vector<Trained> sharded = train_on_threads(ranks, GetParam(), ShardingStrategy::kFullShard);
    expect_close(sharded[0], plain);
    for (const Trained& rank : sharded) expect_same_bits(rank, sharded[0], "another rank");
    for (ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradOp}) {
      expect_same_bits(train_on_threads(ranks, GetParam(), kind)[0], sharded[0], name_of(kind));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stock, Modules, ::testing::ValuesIn(problems()),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- batch norm --------------------------------------------------------------------------------------------------

Problem resnet() {
  const auto make = []() -> std::shared_ptr<Module> {
    return models::ResNet(models::ResNetConfig{.classes = 5, .channels = 2, .blocks = {1, 2}, .width = 6}).ptr();
  };
  const auto loss = [](Module& module, const at::Tensor& rows) {
    const at::Tensor labels = rows.mean({1, 2, 3}).mul(100).to(at::kLong).remainder(5);
    return module.as<models::ResNetImpl>()->forward(rows, labels);
  };
  return {"ResNet", {"BasicBlock"}, {2, 8, 8}, make, loss};
}

// Each rank normalises with its own rows and has its own running statistics, as with DDP. Several ranks are therefore
// not the same as one rank with a larger batch. All strategies nevertheless give the same values on each rank, and the
// same buffers.
TEST(BatchNorm, EveryStrategyGivesEachRankTheSameBuffers) {
  for (int ranks : {2, 3}) {
    const std::vector<Trained> replicated = train_on_threads(ranks, resnet(), ShardingStrategy::kNoShard);
    for (ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp}) {
      const std::vector<Trained> sharded = train_on_threads(ranks, resnet(), kind);
      for (int rank = 0; rank < ranks; ++rank) {
        expect_same_bits(sharded[rank], replicated[rank], name_of(kind) + " rank " + std::to_string(rank));
      }
    }
    const auto& [name, first] = replicated[0].buffers[0];
    EXPECT_FALSE(same_bits(first, replicated[1].buffers[0].second)) << name << " does not depend on the rank's rows";
  }
}

TEST(BatchNorm, OneShardedRankEqualsThePlainRun) {
  const Trained plain = train_plainly(resnet());
  const Trained sharded = train_on_threads(1, resnet(), ShardingStrategy::kFullShard)[0];
  expect_close(sharded, plain);
  ASSERT_GT(plain.buffers.size(), 0u);
  for (std::size_t i = 0; i < plain.buffers.size(); ++i) {
    const auto& [name, buffer] = sharded.buffers[i];
    EXPECT_LT((buffer - plain.buffers[i].second).abs().max().item<double>(), 5e-3) << name;
  }
}

}  // namespace modules_test
}  // namespace tessera::testing
