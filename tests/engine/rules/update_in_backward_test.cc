// Tests "optimizer.in_backward". Training gives the same bits as a run that updates after backward, and gradients of
// only a few units are in memory at a time. Calls that are impossible with updates in backward are refused with an
// error that names the key.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/recompute.h"
#include "tests/support/nested_backward.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace update_in_backward_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr TinyOptions kWide{.vocab = 32, .width = 32, .hidden = 64, .blocks = 9};
constexpr TinyOptions kAwkward{.vocab = 32,
                               .width = 32,
                               .hidden = 64,
                               .blocks = 9,
                               .tied_head = true,
                               .frozen_first_block = true,
                               .unused_block = true};
constexpr TinyOptions kRecomputed{.vocab = 32, .width = 32, .hidden = 64, .blocks = 4, .recompute = true};

struct Formats {
  DType param = DType::kF32, reduce = DType::kF32;
  StateDType state = StateDType::kF32;
};
constexpr Formats kFormats[] = {{},
                                {DType::kBF16, DType::kF32, StateDType::kF32},
                                {DType::kBF16, DType::kBF16, StateDType::k8Bit},
                                {DType::kF32, DType::kBF16, StateDType::kBF16}};

void put_on_disk(Strategy& s, std::int64_t record_bytes, std::optional<std::int64_t> queue_depth) {
  if (s.mixed_precision.param != DType::kF32) s.offload.masters = {Tier::kNvme, 1.0};
  s.offload.moments = {Tier::kNvme, 1.0};
  s.offload.paths = {std::filesystem::temp_directory_path().string()};
  s.offload.record_bytes = record_bytes;
  s.offload.queue_depth = queue_depth;
}

Adjust with(const Formats& formats, bool in_backward, std::int64_t record_bytes = 0) {
  return [=](Strategy& s) {
    update_in_backward(s);
    s.optimizer.in_backward = in_backward;
    s.mixed_precision.reduce = formats.reduce;
    s.optimizer.state_dtype = formats.state;
    if (record_bytes > 0) put_on_disk(s, record_bytes, /*queue_depth=*/2);
  };
}

std::string name_of(const Formats& formats, const Placed& placed, int ranks) {
  return std::string(tessera::name_of(formats.param)) + ", reduce " + std::string(tessera::name_of(formats.reduce)) +
         ", state " + tessera::name_of(formats.state) + ", " + name_of(placed) + " on " + std::to_string(ranks) +
         " ranks";
}

Trained train(const Formats& formats, const Placed& placed, int ranks, const TinyOptions& model, bool in_backward,
              std::int64_t record_bytes = 0, std::int64_t replicate = 0) {
  Strategy strategy = strategy_for(placed, with(formats, in_backward, record_bytes), formats.param);
  strategy.mesh.replicate = replicate;
  return train_on_threads({.ranks = ranks}, strategy, {.model = model, .steps = 5, .batch = 12});
}

TEST(UpdateInBackward, BitsEqualThoseOfUpdatesAfterBackward) {
  const std::pair<std::string, TinyOptions> models[] = {
      {"recomputed", kRecomputed}, {"wide", kWide}, {"awkward", kAwkward}};
  constexpr std::int64_t kRecordBytes[] = {0, 4096, 4 << 20};
  MadeOnce<Trained> after_it;
  for (const auto& each : pairwise_of(kFormats, models, std::array{1, 2, 3}, kInMemory, kRecordBytes)) {
    const auto& [formats, named, ranks, placed, record_bytes] = each;
    const auto& [name, model] = named;
    const std::string of = name_of(formats, placed, ranks) + ", " + name;
    const std::string what = of + ", records of " + std::to_string(record_bytes);
    const Trained& wanted = after_it(of, [&each] {
      return train(std::get<0>(each), std::get<3>(each), std::get<2>(each), std::get<1>(each).second, false);
    });
    const Trained trained = train(formats, placed, ranks, model, true, record_bytes);
    expect_same_bits(trained, wanted, what);
    // Units wait for a unit that gets no gradient, until ranks have agreed on the order.
    for (std::size_t step = model.unused_block ? 1 : 0; step < trained.steps.size(); ++step) {
      EXPECT_EQ(trained.steps[step].planned, trained.steps[step].allocated) << what << ", step " << step;
    }
  }
}

TEST(UpdateInBackward, HasTheSameBitsOnTwoAxes) {
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kHybridShard, ShardingStrategy::kShardOptimizer,
                                         ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard};
  for (const auto& [formats, kind, shared] : pairwise_of(kFormats, kKinds, std::array{false, true})) {
    const Placed placed(kind, shared);
    const Trained wanted = train(formats, placed, 4, kWide, false, 0, 2);
    const Trained trained = train(formats, placed, 4, kWide, true, 0, 2);
    expect_same_bits(trained, wanted, name_of(formats, placed, 4) + ", two replicas");
  }
}

TEST(UpdateInBackward, ValueChecksChangeNoBits) {
  for (const Placed& placed : kInMemory) {
    const Trained wanted = train({}, placed, 2, kWide, false);
    Strategy strategy = strategy_for(placed, with({}, true));
    strategy.check.values = strategy.check.as_across_hosts = true;
    expect_same_bits(train_on_threads({.ranks = 2}, strategy, {.model = kWide, .steps = 5}), wanted, name_of(placed));
  }
}

// Sums of whole steps would need memory for all gradients. Sums of only those units that are under way need less.
TEST(UpdateInBackward, GradientMemoryIsThatOfAFewUnits) {
  for (const Placed& placed : kInMemory) {
    for (int ranks : {1, 2}) {
      const auto gradients = [&](bool in_backward) {
        return train({}, placed, ranks, {.width = 64, .hidden = 256, .blocks = 24}, in_backward)
            .steps[0]
            .planned[MemoryCategory::kGradients];
      };
      EXPECT_LT(gradients(true) * 2, gradients(false)) << tessera::testing::name_of(placed) << " on " << ranks;
    }
  }
}

TEST(UpdateInBackward, DiskTrafficEqualsThePlan) {
  struct Records {
    std::int64_t bytes, queue_depth;
  };
  for (const Records& records :
       {Records{4096, 1}, Records{4096, 3}, Records{4 << 20, 32}}) {  // the last case has slots for all records
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const Adjust adjust = [&](Strategy& s) {
        with({}, true)(s);
        put_on_disk(s, records.bytes, records.queue_depth);
      };
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), kWide);
      expect_planned_disk_traffic(session, "records of " + std::to_string(records.bytes));
    });
  }
}

/// If the queue depth is not given, the plan takes the number of records of a unit. If memory has a limit, the plan
/// takes the smallest depth.
TEST(UpdateInBackward, ChosenQueueDepthMovesThePlansBytes) {
  for (const std::int64_t limit : {0, 1 << 30}) {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      const Adjust adjust = [&](Strategy& s) {
        with({}, true)(s);
        put_on_disk(s, 4096, std::nullopt);
        s.memory.limit_bytes = limit;
      };
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust),
                      {.vocab = 16, .width = 32, .hidden = 128, .blocks = 3});
      const std::int64_t records = session.engine.plan().use[MemoryCategory::kRecords] / 4096;
      EXPECT_EQ(records == 2 * kQueueDepth + 1, limit > 0) << records;
      EXPECT_GE(records, 2 * kQueueDepth + 1);
      expect_planned_disk_traffic(session, "a queue of " + std::to_string(records));
    });
  }
}

/// Returns the errors that end a run of `body` on two ranks, one for each placement.
template <class Body>
std::vector<Error> errors_of(const Body& body, const TinyOptions& model) {
  std::vector<Error> errors;
  for (const Placed& placed : kInMemory) {
    try {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(placed, with({}, true)), model);
        session.train(0);
        body(session);
      });
      ADD_FAILURE() << "no error under " << tessera::testing::name_of(placed);
    } catch (const Error& error) {
      errors.push_back(error);
    }
  }
  return errors;
}

/// A module that uses a layer in two places, both recomputed. The layer's gradients are complete when both places have
/// made their backward.
struct RecomputedTwiceImpl : torch::nn::Module {
  RecomputedTwiceImpl() : shared(register_module("shared", torch::nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const at::Tensor& input) { return at::tanh(shared(input)); };
    return checkpoint(run, checkpoint(run, x)).pow(2).mean();
  }
  torch::nn::Linear shared;
};
TORCH_MODULE(RecomputedTwice);

TEST(UpdateInBackward, RecomputedSharedModuleHasTheSameBits) {
  for (const Placed& placed : kInMemory) {
    std::vector<at::Tensor> weights;
    for (const bool in_backward : {true, false}) {
      Strategy strategy = strategy_for(placed, with({}, in_backward));
      strategy.units.classes = {"Linear"};
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        RecomputedTwice model;
        {
          const at::NoGradGuard no_grad;
          model->shared->weight.fill_(0.25);
          model->shared->bias.fill_(0.5);
        }
        Engine engine(model, strategy, mesh);
        for (int step = 0; step < 3; ++step) {
          engine.backward(model->forward(at::ones({3, 6})));
          engine.step();
        }
        const Gathered all(engine);
        if (mesh.rank() == 0) weights.push_back(model->shared->weight.detach().clone());
      });
    }
    EXPECT_TRUE(same_bits(weights.at(0), weights.at(1))) << tessera::testing::name_of(placed);
  }
}

/// A module that uses a layer twice, each time in its own backward. The Engine counts the layer's gradients as complete
/// after the first backward.
struct NestedTwiceImpl : torch::nn::Module {
  NestedTwiceImpl() : shared(register_module("shared", torch::nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const at::Tensor& input) { return shared(input); };
    return with_nested_backward(run, with_nested_backward(run, x)).pow(2).mean();
  }
  torch::nn::Linear shared;
};
TORCH_MODULE(NestedTwice);

TEST(UpdateInBackward, UnitWhoseGradientComesTwiceIsRefusedByName) {
  for (const Placed& placed : kInMemory) {
    Strategy strategy = strategy_for(placed, with({}, true));
    strategy.units.classes = {"Linear"};
    try {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        NestedTwice model;
        Engine engine(model, strategy, mesh);
        engine.backward(model->forward(at::ones({3, 6}).set_requires_grad(true)));
        engine.step();
      });
      ADD_FAILURE() << "no error under " << tessera::testing::name_of(placed);
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("unit shared"), HasSubstr("in_backward")));
    }
  }
}

TEST(UpdateInBackward, NonFiniteGradientEndsTheRunAndNamesTheUnit) {
  const auto body = [](Session& session) {
    session.engine.backward(session.loss(1) * std::numeric_limits<double>::infinity());
  };
  for (const Error& error : errors_of(body, kWide)) {
    EXPECT_EQ(error.exit_code(), ExitCode::kCorruptData);
    EXPECT_THAT(error.message(), AllOf(HasSubstr("infinite or NaN"), HasSubstr("cannot be skipped")));
  }
}

// ---- reading what is being updated -------------------------------------------------------------------------------

/// A module whose backward reads `second` once more after the gradients of `second` are complete. If `late` is false,
/// backward does not read `second` again.
struct LateReaderImpl : torch::nn::Module {
  explicit LateReaderImpl(bool late)
      : late(late),
        first(register_module("first", torch::nn::Linear(6, 6))),
        second(register_module("second", torch::nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first(x);
    if (late) y = at::linear(y, second->weight.detach());
    return y.pow(2).mean() + second(x).pow(2).mean();  // the operator that runs last is differentiated first
  }
  bool late;
  torch::nn::Linear first, second;
};
TORCH_MODULE(LateReader);

std::string error_of_late_reader(const Placed& placed, bool late) {
  Strategy strategy = strategy_for(placed, with({}, true));
  strategy.units.classes = {"Linear"};
  return error_of([&] {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      LateReader model(late);
      Engine engine(model, strategy, mesh);
      for (int step = 0; step < 2; ++step) {
        engine.backward(model->forward(at::ones({3, 6})));
        engine.step();
      }
    });
  });
}

TEST(UpdateInBackward, BackwardThatReadsAnUpdatedUnitIsRefusedByName) {
  for (const Placed& placed : kInMemory) {
    EXPECT_EQ(error_of_late_reader(placed, false), "") << tessera::testing::name_of(placed);
    EXPECT_THAT(error_of_late_reader(placed, true),
                AllOf(HasSubstr("unit second"), HasSubstr("being updated"), HasSubstr("in_backward")))
        << tessera::testing::name_of(placed);
  }
}

// The step continues after the refusals as if the refused calls had not been made.
TEST(UpdateInBackward, CallsThatNeedOldValuesInMidStepAreRefused) {
  for (const Placed& placed : kInMemory) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      std::vector<double> wanted;
      {
        Session undisturbed(mesh, strategy_for(placed, with({}, true)), kWide);
        for (std::size_t i = 0; i < 3; ++i) wanted.push_back(undisturbed.train(i).loss);
      }
      Session session(mesh, strategy_for(placed, with({}, true)), kWide);
      Engine& engine = session.engine;
      for (std::size_t i = 0; i < 3; ++i) {
        const at::Tensor loss = session.loss(i);
        EXPECT_THAT(error_of([&] { engine.backward(loss, {.retain_graph = true}); }), HasSubstr("retain_graph"));
        {
          Gathered guard(engine);
          EXPECT_THAT(error_of([&] { engine.backward(loss); }), HasSubstr("close that guard"));
        }
        engine.backward(session.loss(i));
        EXPECT_THAT(error_of([&] { engine.zero_grad(); }), AllOf(HasSubstr("zero_grad"), HasSubstr("step() first")));
        EXPECT_THAT(error_of([&] { Gathered guard(engine); }), AllOf(HasSubstr("Gathered"), HasSubstr("step() first")));
        const std::vector<int> batches = {0};
        EXPECT_THAT(error_of([&] { engine.evaluate(batches, [&](int) { return session.loss(0); }); }),
                    AllOf(HasSubstr("evaluate"), HasSubstr("step() first")));
        EXPECT_THAT(error_of([&] { session.loss(i); }), AllOf(HasSubstr("being updated"), HasSubstr("engine.step()")));
        const StepResult result = engine.step();
        EXPECT_EQ(result.loss, wanted[i]) << tessera::testing::name_of(placed);
        engine.zero_grad();
      }
    });
  }
}

}  // namespace update_in_backward_test
}  // namespace tessera::testing
