// Tests how a module's parameters are divided into units and groups.

#include "sharding/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/error.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
    linear = register_module("linear", torch::nn::Linear(12, 12));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Layer);

/// A module with its own scale, three layers, and a head whose weight is that of layer 0.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    scale = register_parameter("scale", torch::ones({3}));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) layers->push_back(Layer());
    head = register_parameter("head", layers[0]->as<LayerImpl>()->linear->weight);
    ids = register_parameter("ids", torch::zeros({4}, torch::kLong), /*requires_grad=*/false);
  }
  at::Tensor scale, head, ids;
  torch::nn::ModuleList layers{nullptr};
};
TORCH_MODULE(Net);

using Units = std::vector<std::unique_ptr<Unit>>;

std::vector<const FlatParameter*> all_of(const Units& units) {
  std::vector<const FlatParameter*> all;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) all.push_back(&parameter);
    }
  }
  return all;
}

std::map<std::string, std::string> unit_by_parameter(const Units& units) {
  std::map<std::string, std::string> found;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) found[parameter.name] = unit->name;
    }
  }
  return found;
}

std::vector<std::string> names_of(const Units& units) {
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit->name);
  return names;
}

std::vector<std::pair<std::string, Strategy>> many_strategies() {
  std::vector<std::pair<std::string, Strategy>> all(1, {"the root alone", {}});
  const auto add = [&](const std::string& what, const auto& change) {
    Strategy strategy;
    change(strategy);
    all.emplace_back(what, strategy);
  };
  add("layers", [](Strategy& s) { s.units.classes = {"Layer"}; });
  add("nested", [](Strategy& s) { s.units.classes = {"Layer", "Linear"}; });
  add("by path", [](Strategy& s) { s.units.modules = {"layers.1", "layers.2.norm"}; });
  add("by size", [](Strategy& s) { s.units.min_numel = 100; });
  add("bf16", [](Strategy& s) {
    s.units.classes = {"Layer"};
    s.mixed_precision.param = DType::kBF16;
    s.mixed_precision.keep_fp32 = {"LayerNorm"};
  });
  for (const double cap : {0.0, 0.001, 25.0}) {
    add("buckets", [cap](Strategy& s) {
      s.strategy = ShardingStrategy::kNoShard;
      s.units.bucket_cap_mb = cap;
      s.units.first_bucket_mb = 0.0005;
    });
  }
  add("8 bits", [](Strategy& s) {
    s.units.classes = {"Layer"};
    s.optimizer.state_dtype = StateDType::k8Bit;
  });
  return all;
}

TEST(Partition, EveryParameterIsInExactlyOneUnit) {
  for (const auto& [what, strategy] : many_strategies()) {
    SCOPED_TRACE(what);
    Net net;
    std::set<const void*> wanted, got;
    for (const at::Tensor& parameter : net->parameters()) wanted.insert(parameter.unsafeGetTensorImpl());
    const Units units = partition(*net, strategy, 2);
    for (const FlatParameter* parameter : all_of(units)) {
      EXPECT_TRUE(got.insert(parameter->tensor.unsafeGetTensorImpl()).second) << parameter->name << " is there twice";
    }
    EXPECT_EQ(got, wanted);
    for (std::size_t i = 0; i < units.size(); ++i) EXPECT_EQ(units[i]->index, static_cast<int>(i));
    EXPECT_EQ(units[0]->name, "(root)");
  }
}

TEST(Partition, ParameterNumbersDoNotDependOnTheUnits) {
  std::map<std::string, std::int64_t> wanted;
  for (const auto& [what, strategy] : many_strategies()) {
    SCOPED_TRACE(what);
    Net net;
    const Units units = partition(*net, strategy, 2);
    std::map<std::string, std::int64_t> numbers;
    std::set<std::int64_t> different;
    for (const FlatParameter* parameter : all_of(units)) {
      numbers[parameter->name] = parameter->number;
      different.insert(parameter->number);
    }
    if (wanted.empty()) wanted = numbers;
    EXPECT_EQ(numbers, wanted);
    EXPECT_EQ(*different.begin(), 0);
    EXPECT_EQ(*different.rbegin() + 1, static_cast<std::int64_t>(different.size()));
  }
  EXPECT_LT(wanted["scale"], wanted["layers.0.norm.weight"]);
  EXPECT_LT(wanted["layers.0.norm.weight"], wanted["layers.2.linear.bias"]);
}

TEST(Partition, GroupsHoldOneDtypeOfEitherTrainableOrFrozen) {
  for (const auto& [what, strategy] : many_strategies()) {
    SCOPED_TRACE(what);
    Net net;
    for (const auto& unit : partition(*net, strategy, 3)) {
      std::set<std::pair<bool, DType>> kinds;
      bool frozen_before = false;
      for (const auto& group : unit->groups) {
        EXPECT_TRUE(kinds.insert({group->trainable, group->dtype}).second) << unit->name;
        EXPECT_FALSE(frozen_before && group->trainable) << "trainable groups come first";
        frozen_before = frozen_before || !group->trainable;
        EXPECT_EQ(group->unit, unit.get());
        ASSERT_EQ(group->layout.size(), group->parameters.size());
        EXPECT_EQ(group->layout.parts(), 3);
        for (std::size_t i = 0; i < group->parameters.size(); ++i) {
          EXPECT_EQ(group->parameters[i].tensor.requires_grad(), group->trainable);
          EXPECT_EQ(group->layout.extent(i).numel, group->parameters[i].numel);
        }
      }
    }
  }
}

TEST(Partition, ParameterBelongsToTheInnermostUnitAroundIt) {
  Net net;
  Strategy strategy;
  strategy.units.classes = {"Layer", "Linear"};
  const Units units = partition(*net, strategy, 2);
  EXPECT_THAT(names_of(units), ElementsAre("(root)", "layers.0", "layers.0.linear", "layers.1", "layers.1.linear",
                                           "layers.2", "layers.2.linear"));
  auto found = unit_by_parameter(units);
  EXPECT_EQ(found["scale"], "(root)");
  EXPECT_EQ(found["layers.1.norm.weight"], "layers.1");
  EXPECT_EQ(found["layers.1.linear.weight"], "layers.1.linear");
}

TEST(Partition, TiedParameterBelongsToTheFirstUnitAndKnowsAllNames) {
  Net net;
  Strategy strategy;
  strategy.units.classes = {"Layer"};
  const Units units = partition(*net, strategy, 2);
  for (const FlatParameter* parameter : all_of(units)) {
    const bool is_tied = parameter->tensor.is_same(net->head);
    EXPECT_EQ(parameter->aliases.size(), is_tied ? 1u : 0u) << parameter->name;
    if (is_tied) {
      EXPECT_EQ(parameter->name, "head");
      EXPECT_THAT(parameter->aliases, ElementsAre("layers.0.linear.weight"));
    }
  }
  EXPECT_EQ(unit_by_parameter(units)["head"], "(root)");
}

// A block of an 8-bit state has one scale.
TEST(Partition, EightBitStatesGiveEachParameterItsOwnBlocks) {
  Net net;
  Strategy strategy;
  strategy.optimizer.state_dtype = StateDType::k8Bit;
  for (const auto& unit : partition(*net, strategy, 2)) {
    for (const auto& group : unit->groups) {
      for (std::size_t i = 0; i < group->layout.size(); ++i) {
        EXPECT_EQ(group->layout.extent(i).offset % kStateBlock, 0) << group->parameters[i].name;
      }
    }
  }
}

TEST(Partition, UnmatchedUnitNamesAreListedWithTheNearest) {
  Net net;
  Strategy strategy;
  strategy.units.classes = {"Layr", "Linear"};
  strategy.units.modules = {"layers.9"};
  try {
    partition(*net, strategy, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.message(), HasSubstr("\"Layr\""));
    EXPECT_THAT(error.message(), HasSubstr("Layer"));
    EXPECT_THAT(error.message(), HasSubstr("\"layers.9\""));
    EXPECT_THAT(error.message(), ::testing::Not(HasSubstr("\"Linear\"")));
  }
}

TEST(Partition, TrainableParameterOfUnsupportedDtypeIsNamed) {
  torch::nn::Linear linear(4, 4);
  linear->to(torch::kDouble);
  try {
    partition(*linear, Strategy(), 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.message(), HasSubstr("weight"));
  }
}

// PowerSGD factors matrices as they lie in memory, so a transposed tensor of sizes [7, 5] is a matrix of sizes [5, 7].
TEST(Partition, TensorsAreMatricesByTheirOutermostDimension) {
  torch::nn::Module module;
  module.register_parameter("convolution", torch::ones({6, 4, 3, 2}));
  module.register_parameter("channels_last", torch::ones({6, 4, 3, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  module.register_parameter("by_columns", torch::ones({5, 7}).t());
  module.register_parameter("one_matrix", torch::ones({1, 8, 9}));
  module.register_parameter("vector", torch::ones({11}));
  module.register_parameter("nothing", torch::ones({0, 3}));
  Strategy strategy;
  EXPECT_TRUE(partition(module, strategy, 1)[0]->groups[0]->shape().factored.empty());
  strategy.compression.method = PowerSgdConfig{.rank = 2};
  EXPECT_THAT(partition(module, strategy, 1)[0]->groups[0]->shape().factored,
              ElementsAre(MatrixShape{6, 24}, MatrixShape{6, 24}, MatrixShape{5, 7}, MatrixShape{8, 9}, MatrixShape{},
                          MatrixShape{}));
}

}  // namespace
}  // namespace tessera::testing
