// Tests Engines over names and tensors instead of a torch::nn::Module: over a script of torch.jit, and over a program's
// own tensors.

#include "tessera/module_view.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/optim/adamw.h>

#include <filesystem>
#include <optional>

#include "runtime/border/throw.h"
#include "tessera/checkpoint.h"
#include "tessera/weights.h"
#include "tests/oracle/child.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace module_view_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

const Placed kScriptPlacements[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients,
                                    ShardingStrategy::kFullShard,
                                    Placed(ShardingStrategy::kFullShard, /*shared=*/true)};

class ScriptView : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { scripts_.emplace(); }
  static void TearDownTestSuite() { scripts_.reset(); }

  /// Returns the file that tests/oracle/script_model.py writes, once for all tests.
  std::string saved(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {(*scripts_ / ("script" + (more.empty() ? "" : more[0]) + ".pt")).string()};
    if (std::filesystem::exists(arguments[0])) return arguments[0];
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto printed = oracle::run_python("script_model.py", arguments, scripts_->path(), 120);
    EXPECT_TRUE(printed.ok()) << printed.status();
    return arguments[0];
  }

  void SetUp() override {
    if (!oracle::python_has_torch()) GTEST_SKIP() << "Python without torch";
  }

  static at::Tensor loss_of(torch::jit::Module& script, const at::Tensor& tokens, const at::Tensor& targets) {
    return script.forward({tokens, targets}).toTensor();
  }
  static Values values_of_script(const torch::jit::Module& script) {
    Values values;
    for (const auto& item : script.named_parameters()) {
      values.emplace_back(item.name, item.value.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    return values;
  }

  static std::optional<TestFolder> scripts_;
  TestFolder folder_;
  // The JIT first runs a graph unchanged, then profiles the graph, and then differentiates it as a whole. There are
  // enough steps for all three stages.
  const std::vector<Batch> batches_ = make_batches(8, 4, 5, 19);
};

std::optional<TestFolder> ScriptView::scripts_;

/// Losses of all steps, and the values at the end.
struct ScriptRun {
  std::vector<double> losses;
  Values values;
};

void expect_as(const ScriptRun& got, const ScriptRun& wanted, const std::string& what) {
  ASSERT_EQ(got.losses.size(), wanted.losses.size()) << what;
  for (std::size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], wanted.losses[i], 1e-5) << what;
  expect_close(got.values, wanted.values, 1e-5, what);
}

TEST_F(ScriptView, TrainsAsThePlainScriptUnderEveryStrategy) {
  const std::string file = saved();
  const auto train_plain = [&] {
    torch::jit::Module script = torch::jit::load(file);
    std::vector<at::Tensor> parameters;
    for (const auto& item : script.named_parameters()) {
      if (item.name != "head.weight") parameters.push_back(item.value);  // the head shares the embedding's weight
    }
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    ScriptRun run;
    for (const Batch& batch : batches_) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(script, batch.tokens, batch.targets);
      loss.backward();
      optimizer.step();
      run.losses.push_back(loss.item<double>());
    }
    run.values = values_of_script(script);
    return run;
  };
  const ScriptRun plain = train_plain();
  ASSERT_LT(plain.losses.back(), plain.losses.front());
  const auto adjust = [](Strategy& strategy) {
    strategy.gradient_clipping = 0;
    strategy.optimizer.lr = 1e-2;
    strategy.optimizer.weight_decay = 0.1;
  };
  for (const int ranks : {1, 2}) {
    on_placements(
        kScriptPlacements, ranks,
        [&](const Mesh& mesh, const Strategy& strategy) {
          torch::jit::Module script = torch::jit::load(file);
          Engine engine(ModuleView::of(script), strategy, mesh);
          EXPECT_THAT(engine.unit_names(), ElementsAre("(root)", "layers.0", "layers.1", "layers.2"));
          ScriptRun run;
          for (const Batch& batch : batches_) {
            engine.backward(loss_of(script, rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
            run.losses.push_back(engine.step().loss);
          }
          const bool gathers =
              strategy.strategy == ShardingStrategy::kFullShard && !strategy.host_sharing && ranks == 2;
          EXPECT_EQ(engine.traffic().gathers > 0, gathers);
          EXPECT_EQ(engine.allocated(), engine.plan().use);
          const Gathered gathered(engine);
          run.values = values_of_script(script);
          expect_as(run, plain, "rank " + std::to_string(mesh.rank()) + " of " + std::to_string(ranks));
        },
        adjust);
  }
}

TEST_F(ScriptView, EvaluationEqualsThePlainScripts) {
  const std::string file = saved();
  torch::jit::Module whole = torch::jit::load(file);
  whole.eval();
  const at::NoGradGuard no_grad;
  const double wanted = loss_of(whole, batches_[0].tokens, batches_[0].targets).item<double>();
  on_placements(kScriptPlacements, 2, [&](const Mesh& mesh, const Strategy& strategy) {
    torch::jit::Module script = torch::jit::load(file);
    script.eval();
    Engine engine(ModuleView::of(script), strategy, mesh);
    // The same batch is used again and again, since the JIT optimizes only graphs that have run.
    const std::vector<Batch> loader(4, {rows_of(batches_[0].tokens, mesh), rows_of(batches_[0].targets, mesh)});
    const auto found =
        engine.evaluate(loader, [&](const Batch& batch) { return loss_of(script, batch.tokens, batch.targets); });
    EXPECT_NEAR(found.loss, wanted, 1e-5);
  });
}

TEST_F(ScriptView, SavedWeightsHaveTheScriptsNames) {
  const std::string file = saved(), weights = (folder_ / "weights.pt").string();
  torch::jit::Module whole = torch::jit::load(file);
  std::vector<std::string> names;
  for (const auto& item : whole.named_parameters()) names.push_back(item.name);
  for (const auto& item : whole.named_buffers()) names.push_back(item.name);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    torch::jit::Module script = torch::jit::load(file);
    Engine engine(ModuleView::of(script), strategy_for(ShardingStrategy::kFullShard), mesh);
    save_weights(engine, weights);
  });
  const std::string bytes = TestFolder::content_of(weights);
  const auto dictionary = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
  std::vector<std::string> got;
  for (const auto& entry : dictionary) got.push_back(entry.key().toStringRef());
  EXPECT_THAT(got, UnorderedElementsAreArray(names));
  for (const auto& item : whole.named_parameters()) {
    EXPECT_TRUE(at::equal(dictionary.at(item.name).toTensor(), item.value)) << item.name;
  }
}

TEST_F(ScriptView, FrozenScriptIsRefused) {
  const torch::jit::Module frozen = torch::jit::load(saved({"frozen"}));
  EXPECT_THAT(usage_error_of([&] { ModuleView::of(frozen); }), HasSubstr("save the module before those"));
}

/// Makes a view of Tiny only from the names of its tensors, as a program without LibTorch modules would.
std::shared_ptr<ModuleView> view_of(const TinyImpl& model) {
  auto view = std::make_shared<ModuleView>("Tiny");
  for (std::size_t i = 0; i < model.blocks->size(); ++i) view->add_module("blocks." + std::to_string(i), "Block");
  for (const auto& item : model.named_parameters()) view->add_parameter(item.key(), item.value());
  return view;
}

void expect_bits_and_checkpoints_of_the_module(const Mesh& mesh, const Strategy& strategy, const std::string& place) {
  Session session(mesh, strategy, {.tied_head = true});
  Tiny model = make_tiny({.tied_head = true}, /*deferred=*/false);
  Engine engine(view_of(*model), strategy, mesh);
  const auto train = [&](std::size_t i) {
    const Batch& batch = session.batches[i];
    engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
    engine.step();
  };
  const auto values = [&] {
    const Gathered gathered(engine);
    return values_of(*model);
  };
  session.train(0);
  train(0);
  EXPECT_TRUE(all_same_bits(values(), session.values()));
  save_checkpoint(engine, place);
  train(1);
  const Values ahead = values();
  load_checkpoint(session.engine, place);  // this loads the view's checkpoint into the module's Engine
  session.train(1);
  EXPECT_TRUE(all_same_bits(ahead, session.values()));
}

TEST(TensorView, BitsAndCheckpointsEqualTheModules) {
  for (const Placed& placed : kOnePerPlacement) {
    SCOPED_TRACE(name_of(placed));
    const TestFolder folder;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      expect_bits_and_checkpoints_of_the_module(mesh, strategy_for(placed), (folder / "checkpoints").string());
    });
  }
}

TEST(TensorView, InvalidNamesAndTensorsAreRefused) {
  ModuleView view;
  const at::Tensor weight = at::zeros({4, 4}).requires_grad_();
  view.add_parameter("net.0.weight", weight);
  view.add_buffer("net.0.mean", at::zeros({4}));
  const auto error = [&](const std::string& path, const at::Tensor& tensor) {
    return usage_error_of([&] { view.add_parameter(path, tensor); });
  };
  const at::Tensor other = at::zeros({2});
  for (const std::string name : {"", ".", "a..b", "a.", ".a"}) {
    EXPECT_THAT(error(name, other), HasSubstr("words with dots between them")) << name;
  }
  EXPECT_THAT(error("net.0.weight", other), HasSubstr("weight is a parameter already"));
  EXPECT_THAT(error("net.0.mean", other), HasSubstr("mean is a buffer already"));
  EXPECT_THAT(error("net.0", other), HasSubstr("0 is a module already"));
  EXPECT_THAT(error("net.0.weight.more", other), HasSubstr("weight is a parameter already"));
  EXPECT_THAT(error("a", at::Tensor()), HasSubstr("undefined"));
  EXPECT_THAT(error("a", weight + 1), HasSubstr("result of an operator"));
  EXPECT_THAT(error("a", at::eye(2).to_sparse()), HasSubstr("layout Sparse"));
  EXPECT_THAT(error("a", weight.detach()), HasSubstr("has the memory of net.0.weight"));
  EXPECT_THAT(usage_error_of([&] { view.add_buffer("net", other); }), HasSubstr("net is a module already"));
  EXPECT_THAT(usage_error_of([&] { view.add_module("net.0", "Block"); }), HasSubstr("0 is a module already"));
  EXPECT_THAT(usage_error_of([&] { view.add_module("b", std::shared_ptr<ModuleView>()); }), HasSubstr("null"));
  // The refused calls have added nothing.
  EXPECT_EQ(view.named_parameters().keys(), std::vector<std::string>{"net.0.weight"});
  EXPECT_EQ(view.named_children().keys(), std::vector<std::string>{"net"});
  view.add_parameter("tied.weight", weight);
  EXPECT_EQ(view.named_parameters().size(), 2u);
}

}  // namespace module_view_test
}  // namespace tessera::testing
