// Tests a program's own rules for sums of gradients.

#include "tessera/comm_hook.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/engine/wire/gradient_methods.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace comm_hook_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A hook that makes the same sums as Tessera itself.
struct Plain : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override { ranks.all_reduce(bucket.gradients); }
};

/// A hook that sends contributions in bf16, from all ranks to all ranks, or to the rank that sums a part.
struct InBf16 final : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    const at::Tensor own = bucket.gradients.to(at::kBFloat16);
    bucket.gradients.zero_();
    for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
  }
};
struct InBf16ByParts final : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    const std::int64_t numel = bucket.gradients.numel(), part = (numel + ranks.size() - 1) / ranks.size();
    const at::Tensor padded = at::zeros({part * ranks.size()}, at::kBFloat16);
    padded.narrow(0, 0, numel).copy_(bucket.gradients);
    at::Tensor sum = at::zeros({part});
    for (const at::Tensor& each : ranks.all_to_all(padded.view({ranks.size(), part})).unbind(0)) sum.add_(each);
    bucket.gradients = at::cat(ranks.all_gather(sum)).narrow(0, 0, numel).contiguous();
  }
};

Adjust with_hook(const Adjust& adjust = nullptr) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.method = CommHookConfig();
    if (adjust) adjust(strategy);
  };
}

/// A session whose Engine has a hook.
struct Hooked {
  Hooked(const Mesh& mesh, const Strategy& strategy, std::shared_ptr<CommHook> hook, TinyOptions options = {})
      : model(make_tiny(options, true)),
        engine(model, strategy, mesh, std::move(hook)),
        batches(make_batches(8, 24, 5, options.vocab)),
        mesh(mesh) {}
  void train(std::size_t i) {
    for (std::int64_t k = 0; k < engine.strategy().gradient_accumulation; ++k) {
      const Batch& batch = batches[(i + static_cast<std::size_t>(k)) % batches.size()];
      engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
    }
    last = engine.step();
  }
  Values values() {
    const Gathered gathered(engine);
    return values_of(*model);
  }

  Tiny model;
  Engine engine;
  std::vector<Batch> batches;
  const Mesh& mesh;
  StepResult last;
};

/// Returns the values after three steps. `hook` may be null.
Values trained_by(const Mesh& mesh, Strategy strategy, std::shared_ptr<CommHook> hook, TinyOptions options = {}) {
  if (hook) strategy.compression.method = CommHookConfig();
  const auto run = [&](auto& hooked) {
    for (std::size_t i = 0; i < 3; ++i) hooked.train(i);
    return hooked.values();
  };
  Hooked hooked(mesh, strategy, std::move(hook), options);
  return run(hooked);
}

TEST(CommHook, PlainSumChangesNoBits) {
  TinyOptions unused, recomputed;
  unused.frozen_first_block = unused.unused_block = true;
  recomputed.shared_block = recomputed.recompute = recomputed.tied_head = true;
  const std::pair<const char*, Adjust> kAdjusts[] = {
      {"plain", [](Strategy&) {}},
      {"clipped", [](Strategy& s) { s.gradient_clipping = 0.1; }},
      {"accumulation", [](Strategy& s) { s.gradient_accumulation = 2; }},
      {"late sync",
       [](Strategy& s) {
         s.gradient_accumulation = 2;
         s.gradient_sync = GradientSync::kLastMicrobatch;
       }},
      {"in backward", update_in_backward},
      {"one after the other", [](Strategy& s) { s.reductions_ahead = 0; }}};
  const TinyOptions models[] = {TinyOptions{}, unused, recomputed};
  const auto exists = [](ShardingStrategy, const std::pair<const char*, Adjust>& adjust, const TinyOptions& model) {
    return !model.recompute || std::string(adjust.first) != "in backward";  // recomputed gradients come late
  };
  const auto cases = pairwise_where(exists, kWhole, kAdjusts, models);
  for (const int ranks : {1, 2, 3}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      for (const auto& [kind, adjust, model] : cases) {
        const Strategy strategy = strategy_for(kind, [&, &adjust = adjust](Strategy& s) {
          descend(s);
          adjust.second(s);
        });
        EXPECT_TRUE(all_same_bits(trained_by(mesh, strategy, std::make_shared<Plain>(), model),
                                  trained_by(mesh, strategy, nullptr, model)))
            << ranks << " ranks, " << name_of(kind) << ", " << adjust.first;
      }
    });
  }
}

// A job of one rank makes no sums over ranks, on whichever tier gradients lie.
TEST(CommHook, LoneRankDoesNotCallIt) {
  for (const Tier gradients : {Tier::kMemory, Tier::kNvme}) {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
        descend(s);
        s.offload.gradients = gradients;
        s.offload.paths = {std::filesystem::temp_directory_path().string()};
        if (gradients == Tier::kMemory) s.offload.paths.clear();
      });
      EXPECT_TRUE(
          all_same_bits(trained_by(mesh, strategy, std::make_shared<InBf16>()), trained_by(mesh, strategy, nullptr)));
    });
  }
}

TEST(CommHook, AllStrategiesHaveTheSameBitsOverANetwork) {
  on_hosts(2, 2, [](const Mesh& mesh) {
    const auto run = [&](ShardingStrategy kind, std::shared_ptr<CommHook> hook) {
      return trained_by(mesh, strategy_for(kind, descend), std::move(hook));
    };
    const Values exact = run(ShardingStrategy::kNoShard, nullptr);
    require(all_same_bits(run(ShardingStrategy::kNoShard, std::make_shared<Plain>()), exact), "plain sums are exact");
    const Values narrow = run(ShardingStrategy::kNoShard, std::make_shared<InBf16>());
    const double far = distance(narrow, exact);
    require(far > 0 && far < 1e-2, c10::str("bf16: ", far, " away"));
    require(all_same_bits(run(ShardingStrategy::kNoShard, std::make_shared<InBf16ByParts>()), narrow), "by parts");
    for (const ShardingStrategy kind : {ShardingStrategy::kShardOptimizer, ShardingStrategy::kShardGradients})
      require(all_same_bits(run(kind, std::make_shared<InBf16>()), narrow), name_of(kind) + " has other bits");
  });
}

/// A hook that records the buckets that it gets.
struct Noting final : Plain {
  explicit Noting(int rank) : rank(rank) {}
  void sum(Bucket& bucket, Ranks& ranks) override {
    EXPECT_EQ(ranks.rank(), rank);
    calls[bucket.step].push_back(bucket.index);
    units[bucket.index].insert(bucket.unit);
    for (const Bucket::Part& part : bucket.parts) {
      parameters.insert(part.parameter);
      EXPECT_EQ(part.gradient.storage().data(), bucket.gradients.storage().data());
      // The hook has to sum the values that are set here.
      part.gradient.fill_(rank + 1.0);
    }
    Plain::sum(bucket, ranks);
    for (const Bucket::Part& part : bucket.parts) EXPECT_TRUE(part.gradient.eq(3.0).all().item<bool>());
  }
  const int rank;
  std::map<std::int64_t, std::vector<std::int64_t>> calls;  ///< [step]: the calls in it
  std::map<std::int64_t, std::set<std::string>> units;
  std::set<std::string> parameters;
};

TEST(CommHook, HookGetsUnitStepAndParameters) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto hook = std::make_shared<Noting>(mesh.rank());
    Hooked hooked(mesh, strategy_for(ShardingStrategy::kNoShard, with_hook([](Strategy& s) { s.optimizer.lr = 1; })),
                  hook);
    const Values before = hooked.values();
    for (std::size_t i = 0; i < 3; ++i) hooked.train(i);
    ASSERT_EQ(hook->calls.size(), 3u);
    for (std::int64_t step : {1, 2, 3}) {
      const std::set<std::int64_t> each(hook->calls[step].begin(), hook->calls[step].end());
      EXPECT_EQ(each.size(), hook->calls[step].size()) << "a bucket was summed twice";
      EXPECT_EQ(each.size(), hook->units.size());
    }
    std::set<std::string> names;
    for (const auto& unit : hook->units) EXPECT_EQ(unit.second.size(), 1u) << "bucket " << unit.first;
    for (const auto& parameter : hooked.model->named_parameters()) names.insert(parameter.key());
    EXPECT_EQ(hook->parameters, names);
    // Each of three steps has a sum of 3 over 2 ranks, a mean of 1.5, and a rate of 1.
    const Values after = hooked.values();
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(at::allclose(before[i].second - after[i].second, at::full_like(after[i].second, 4.5), 1e-4, 1e-4));
  });
}

TEST(CommHook, BeginsAtItsStartStep) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto hook = std::make_shared<Noting>(mesh.rank());
    Hooked hooked(
        mesh, strategy_for(ShardingStrategy::kNoShard, with_hook([](Strategy& s) { s.compression.start_step = 2; })),
        hook);
    for (std::size_t i = 0; i < 4; ++i) hooked.train(i);
    ASSERT_EQ(hook->calls.size(), 2u);
    EXPECT_TRUE(hook->calls.contains(3) && hook->calls.contains(4));
  });
}

/// A hook that fails on rank 1.
struct Failing final : Plain {
  void sum(Bucket& bucket, Ranks& ranks) override {
    if (ranks.rank() == 1 && bucket.step == 2) throw std::runtime_error("the codec is out of codes");
    Plain::sum(bucket, ranks);
  }
};
struct Leaving final : Plain {
  void sum(Bucket& bucket, Ranks& ranks) override {
    Plain::sum(bucket, ranks);
    bucket.gradients = bucket.gradients.to(at::kHalf);
  }
};

/// A hook whose result is not in the memory of the host.
struct LeavingElsewhere final : Plain {
  void sum(Bucket& bucket, Ranks& ranks) override {
    Plain::sum(bucket, ranks);
    bucket.gradients = bucket.gradients.to(at::kMeta);
  }
};

struct LeavingSparse final : Plain {
  void sum(Bucket& bucket, Ranks& ranks) override {
    Plain::sum(bucket, ranks);
    bucket.gradients = bucket.gradients.to_sparse();
  }
};

std::string failure_of(int ranks, const std::function<void(const Mesh&)>& body) {
  try {
    run_ranks({.ranks = ranks}, body);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing failed";
}

TEST(CommHook, FailuresEndAllRanksWithTheirText) {
  const auto train = [](std::shared_ptr<CommHook> hook) {
    return [hook](const Mesh& mesh) {
      Hooked hooked(mesh, strategy_for(ShardingStrategy::kNoShard, with_hook()), hook);
      for (std::size_t i = 0; i < 4; ++i) hooked.train(i);
    };
  };
  EXPECT_THAT(failure_of(2, train(std::make_shared<Failing>())),
              AllOf(HasSubstr("CommHook, bucket "), HasSubstr("the codec is out of codes")));
  EXPECT_THAT(failure_of(2, train(std::make_shared<Leaving>())),
              AllOf(HasSubstr("CommHook left CPUHalfType"), HasSubstr("contiguous numbers of fp32 on the CPU")));
  EXPECT_THAT(failure_of(2, train(std::make_shared<LeavingElsewhere>())),
              HasSubstr("contiguous numbers of fp32 on the CPU"));
  EXPECT_THAT(failure_of(2, train(std::make_shared<LeavingSparse>())),
              HasSubstr("contiguous numbers of fp32 on the CPU"));
}

TEST(CommHook, HookAndStrategyMustAgree) {
  const auto make = [](bool key, std::shared_ptr<CommHook> hook, std::int64_t shard = 0) {
    return [=](const Mesh& mesh) {
      Hooked hooked(mesh,
                    strategy_for(ShardingStrategy::kNoShard,
                                 [&](Strategy& s) {
                                   if (key) s.compression.method = CommHookConfig();
                                   s.mesh.shard = shard;
                                 }),
                    hook);
    };
  };
  EXPECT_THAT(failure_of(2, make(true, nullptr)), HasSubstr("give the Engine a CommHook"));
  EXPECT_THAT(failure_of(2, make(false, std::make_shared<Plain>())),
              HasSubstr("compression.method is of another type than hook"));
  EXPECT_THAT(failure_of(4, make(true, std::make_shared<Plain>(), 2)), HasSubstr("a mesh of one replica"));
}

}  // namespace comm_hook_test
}  // namespace tessera::testing
