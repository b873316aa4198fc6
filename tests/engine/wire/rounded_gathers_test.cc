// Tests parameters that are gathered in fewer bits over a network. Ranks are processes that Gloo joins.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/strategy_names.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/wrapped_groups.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace rounded_gathers_test {

constexpr std::size_t kSteps = 4;
constexpr ShardingStrategy kFull = ShardingStrategy::kFullShard;

Adjust rounds_gathers(WireForm form, const Adjust& more = nullptr) {
  return [=](Strategy& strategy) {
    strategy.compression.gathers = form;
    if (more) more(strategy);
  };
}

// Every rank computes with the same rounded parameters. This holds for the rank's own part of them, too.
TEST(RoundedGathers, AllRanksComputeWithTheSameRoundedValues) {
  for (const auto& [ranks, hosts] : {std::pair(2, 2), {3, 3}, {4, 2}}) {
    on_hosts(ranks, hosts, [](const Mesh& mesh) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        std::vector<std::string> seen;
        for (const WireForm form : {WireForm::kPlain, WireForm::kInt8, WireForm::kInt4}) {
          Session session(mesh, strategy_for(kFull, rounds_gathers(form), dtype));
          const at::NoGradGuard no_gradients;
          const Batch& batch = session.batches[0];
          const double loss = session.model->forward(batch.tokens, batch.targets).to(at::kDouble).item<double>();
          const std::vector<std::string> all = all_gather(mesh, c10::str(std::hexfloat, loss));
          for (const std::string& each : all) require(each == all[0], "ranks have the losses " + each + ", " + all[0]);
          for (const std::string& other : seen) require(other != all[0], name_of(form) + " rounds nothing");
          seen.push_back(all[0]);
        }
      }
    });
  }
}

// Nothing changes at a rate of 0, however often rounded parameters are used. They are never used for an update, and
// never shown.
TEST(RoundedGathers, ParametersThemselvesAreNeverRounded) {
  on_hosts(2, 2, [](const Mesh& mesh) {
    const auto still = [](Strategy& strategy) {
      strategy.optimizer.lr = 0;
      strategy.optimizer.weight_decay = 0;
    };
    for (const bool on_disk : {false, true}) {
      const Placed placed(kFull, /*shared=*/false, on_disk);
      Session exact(mesh, strategy_for(placed, still));
      const Values first = exact.values();
      Session session(mesh, strategy_for(placed, rounds_gathers(WireForm::kInt4, still)));
      require(all_same_bits(session.values(), first), "before a step");
      for (std::size_t i = 0; i < kSteps; ++i) {
        const at::Tensor loss = session.loss(i);
        require(all_same_bits(session.values(), first), "between forward and backward");
        session.engine.backward(loss);
        require(all_same_bits(session.values(), first), "between backward and step");
        session.engine.step();
      }
      require(all_same_bits(session.values(), first), "after steps");
    }
  });
}

// Training does not depend on reads between calls, on how far in advance units are gathered, or on the tier of
// parameters.
TEST(RoundedGathers, TrainingDoesNotDependOnGathersAheadOrLooks) {
  for (const auto& [ranks, hosts] : {std::pair(2, 2), {4, 2}}) {
    on_hosts(ranks, hosts, [](const Mesh& mesh) {
      const Values exact = trained(mesh, strategy_for(kFull), kSteps);
      FirstValues first;
      const auto expect_same = [&](const std::string& what, const Placed& placed, const Adjust& more) {
        require(first.same_bits(trained(mesh, strategy_for(placed, rounds_gathers(WireForm::kInt8, more)), kSteps)),
                what + " has other bits");
      };
      expect_same("the first", kFull, nullptr);
      expect_same("prefetch 0", kFull, [](Strategy& s) { s.prefetch = 0; });
      expect_same("prefetch 3", kFull, [](Strategy& s) { s.prefetch = 3; });
      expect_same("on disk", Placed(kFull, /*shared=*/false, /*on_disk=*/true), nullptr);
      Session session(mesh, strategy_for(kFull, rounds_gathers(WireForm::kInt8)));
      const auto look = [&] { const Gathered looks(session.engine); };
      for (std::size_t i = 0; i < kSteps; ++i) {
        const at::Tensor loss = session.loss(i);
        look();
        session.engine.backward(loss);
        look();
        session.engine.step();
        look();
      }
      require(first.same_bits(session.values()), "with looks between has other bits");
      const double far = distance(session.values(), exact);
      require(far > 0 && far < 0.03, "int8 is " + std::to_string(far) + " away");
    });
  }
}

// Bits stay the same with all other settings that change how parameters are sent, and with two axes over the network.
TEST(RoundedGathers, OtherGatherOptionsBesideThemKeepTheBits) {
  struct Case {
    const char* what;
    Adjust adjust;
    DType dtype = DType::kF32;
    TinyOptions model = {};
  };
  const auto on_two_axes = [](Strategy& s) { s.strategy = ShardingStrategy::kHybridShard, s.mesh.replicate = 2; };
  const Case cases[] = {
      {"in backward", update_in_backward},
      {"accumulation", [](Strategy& s) { s.gradient_accumulation = 2; }},
      {"an average", [](Strategy& s) { s.ema.decay = 0.9; }},
      {"values are checked", [](Strategy& s) { s.check.values = true; }},
      {"bf16", nullptr, DType::kBF16},
      {"fp16", nullptr, DType::kF16},
      {"recomputation", nullptr, DType::kF32, {.recompute = true}},
      {"frozen and tied", nullptr, DType::kF32, {.tied_head = true, .frozen_first_block = true}},
      {"two axes", on_two_axes},
  };
  on_hosts(4, 4, [&](const Mesh& mesh) {
    for (const Case& each : cases) {
      const auto learnt = [&](const Adjust& adjust, std::int64_t prefetch, bool looks) {
        const Adjust all = [&](Strategy& strategy) {
          if (each.adjust) each.adjust(strategy);
          if (adjust) adjust(strategy);
          strategy.prefetch = prefetch;
        };
        Session session(mesh, strategy_for(kFull, all, each.dtype), each.model);
        for (std::size_t i = 0; i < kSteps; ++i) {
          session.train(i);
          if (!looks) continue;
          const Gathered first(session.engine), second(session.engine);
        }
        if (looks && session.engine.strategy().ema.decay > 0) const Gathered averages(session.engine, Gathered::kEma);
        return session.values();
      };
      const Values rounded = learnt(rounds_gathers(WireForm::kInt8), 1, false);
      require(all_same_bits(learnt(rounds_gathers(WireForm::kInt8), 3, true), rounded),
              std::string(each.what) + " has other bits");
      const double far = distance(rounded, learnt(nullptr, 1, false));
      require(far > 0 && far < 0.05, std::string(each.what) + " is " + std::to_string(far) + " away");
    }
  });
}

TEST(RoundedGathers, CheckpointResumesWithTheSameBits) {
  const TestFolder folder;
  const std::string path = folder.path().string();
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const Strategy strategy = strategy_for(kFull, rounds_gathers(WireForm::kInt4));
    Session first(mesh, strategy);
    for (std::size_t i = 0; i < 2; ++i) first.train(i);
    save_checkpoint(first.engine, path + "/checkpoint");
    for (std::size_t i = 2; i < kSteps; ++i) first.train(i);
    Session second(mesh, strategy);
    second.train(3);
    load_checkpoint(second.engine, path + "/checkpoint");
    for (std::size_t i = 2; i < kSteps; ++i) second.train(i);
    require(all_same_bits(second.values(), first.values()), "it learns something else");
  });
}

/// Collectives that say that they use a network, and record the codecs of gathers.
class FormsOf final : public ForwardingCollectives {
 public:
  FormsOf(std::shared_ptr<Collectives> inner, std::mutex& mutex, std::set<WireForm>& forms)
      : ForwardingCollectives(std::move(inner)), mutex_(mutex), forms_(forms) {}
  int compressed_part() const override { return 1; }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    if (call.options.dtype != DType::kU8) {
      const std::lock_guard lock(mutex_);
      forms_.insert(call.options.form);
    }
    return ForwardingCollectives::do_all_gather(call);
  }

 private:
  std::mutex& mutex_;
  std::set<WireForm>& forms_;
};

// Values that stay in memory are never rounded.
TEST(RoundedGathers, EachPlacementSendsTheConfiguredWireForms) {
  using enum WireForm;
  using Forms = std::set<WireForm>;
  struct Case {
    Placed placed;
    WireForm form;
    bool has_replicas;
    Forms gathered, published;  ///< forms on the shard axis and on the replicate axis
  };
  const Case cases[] = {
      {kFull, kLossless, false, {kLossless}, {}},
      {kFull, kInt8, false, {kInt8}, {}},
      {ShardingStrategy::kShardGradOp, kLossless, false, {kLossless}, {}},
      {ShardingStrategy::kShardGradients, kLossless, false, {kLossless}, {}},
      {ShardingStrategy::kShardOptimizer, kLossless, false, {kLossless}, {}},
      {ShardingStrategy::kHybridShard, kLossless, true, {kLossless}, {kLossless}},
      {ShardingStrategy::kHybridShard, kInt4, true, {kInt4}, {kPlain}},
  };
  for (const Case& each : cases) {
    std::mutex mutex;
    std::map<std::string, Forms> forms;
    ThreadRanks on{.ranks = each.has_replicas ? 4 : 2};
    on.wrap_groups = [&](std::shared_ptr<GroupFactory> factory) {
      return wrapped_groups(std::move(factory), [&](const std::string& use, std::shared_ptr<Collectives> group) {
        const std::lock_guard lock(mutex);
        return std::make_shared<FormsOf>(std::move(group), mutex, forms[use]);
      });
    };
    run_ranks(on, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(each.placed, rounds_gathers(each.form, [&](Strategy& s) {
                                           if (!each.has_replicas) return;
                                           s.mesh.replicate = 2;
                                           s.optimizer.shard_over_world = true;
                                         })));
      for (std::size_t i = 0; i < 2; ++i) session.train(i);
    });
    EXPECT_EQ(forms["gather"], each.gathered) << name_of(each.placed) << ", " << name_of(each.form);
    EXPECT_EQ(forms["replicate"], each.published) << name_of(each.placed) << ", " << name_of(each.form);
  }
}

TEST(RoundedGathers, ForwardRoundsTheValuesAGuardWrote) {
  on_hosts(2, 2, [](const Mesh& mesh) {
    const auto halved = [&](Session& session) {
      const Gathered writes(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_gradients;
      for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(0.5);
    };
    Session session(mesh, strategy_for(kFull, rounds_gathers(WireForm::kInt8))), exact(mesh, strategy_for(kFull));
    const double before = session.loss(0).item<double>();
    halved(session);
    halved(exact);
    require(all_same_bits(session.values(), exact.values()), "what was written is not exact");
    const double after = session.loss(0).item<double>(), wanted = exact.loss(0).item<double>();
    require(std::abs(after - wanted) < 0.02 * std::abs(before - wanted), "forward does not have what was written");
  });
}

// If there are two hosts, the copy is in the shared memory of each host. If there are four hosts, two of them together
// hold one copy, and Gloo joins them.
TEST(SecondCopyOnHosts, PlainHasTheBitsOfFullShardAndInt8IsClose) {
  for (const int hosts : {2, 4}) {
    on_hosts(4, hosts, [hosts](const Mesh& mesh) {
      const auto learnt = [&](SecondaryForm form, WireForm gathers) {
        const Adjust copy = [&](Strategy& strategy) {
          strategy.secondary.form = form;
          strategy.secondary.ranks = form != SecondaryForm::kNone && hosts == 4 ? 2 : 0;
          strategy.gradient_accumulation = 2;
        };
        return trained(mesh, strategy_for(kFull, rounds_gathers(gathers, copy)), kSteps);
      };
      const Values exact = learnt(SecondaryForm::kNone, WireForm::kPlain);
      require(all_same_bits(learnt(SecondaryForm::kPlain, WireForm::kPlain), exact), "plain has other bits");
      const Values rounded = learnt(SecondaryForm::kNone, WireForm::kInt8);
      require(all_same_bits(learnt(SecondaryForm::kPlain, WireForm::kInt8), rounded),
              "rounded gathers have other bits");
      const double far = distance(learnt(SecondaryForm::kInt8, WireForm::kPlain), exact);
      require(far > 0 && far < 0.05, "int8 is " + std::to_string(far) + " away");
    });
  }
}

// Forward may run under a Gathered guard. It then uses the exact values, since these are in memory.
TEST(RoundedGathers, ForwardUnderAGuardUsesExactValues) {
  on_hosts(2, 2, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(kFull, rounds_gathers(WireForm::kInt4))), exact(mesh, strategy_for(kFull));
    const at::NoGradGuard no_gradients;
    const double wanted = exact.loss(0).item<double>(), rounded = session.loss(0).item<double>();
    require(rounded != wanted, "nothing is rounded");
    {
      const Gathered guard(session.engine);
      require(session.loss(0).item<double>() == wanted, "under a guard");
    }
    require(session.loss(0).item<double>() == rounded, "behind a guard");
  });
}

TEST(RoundedGathers, SharedMemoryIsNotRounded) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    EXPECT_TRUE(all_same_bits(trained(mesh, strategy_for(kFull, rounds_gathers(WireForm::kInt4)), kSteps),
                              trained(mesh, strategy_for(kFull), kSteps)));
  });
}

}  // namespace rounded_gathers_test
}  // namespace tessera::testing
