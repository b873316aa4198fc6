// Tests "optimizer.in_backward" under rules that need more of a unit than its elements one by one: norms of its layers,
// or whole matrices. Training gives the same bits as a run that updates after backward. Ranks exchange data once for
// each unit, and memory and traffic of the disk are as planned.

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/strategy_names.h"
#include "tests/golden_steps/gloo_ranks.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/stand_ins/wrapped_groups.h"

namespace tessera::testing {
namespace in_backward_rules_test {

struct Rule {
  std::string name;
  OptimizerConfig config;
  OwnRules own = {};
};

Rule lamb() { return {"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}}; }

Rule lars() {
  return {"lars",
          {.type = OptimizerType::kLars,
           .lr = 0.5,
           .weight_decay = 0.1,
           .momentum = 0.9,
           .nesterov = true,
           .trust_coefficient = 0.02}};
}

Rule adafactor() { return {"adafactor", {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1}}; }

Rule muon() { return {"muon", {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}}; }

Rule own_matrix() {
  return {"own_matrix",
          {.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1},
          OwnRules::of(std::make_shared<OwnMuon>())};
}

std::vector<Rule> rules() { return {lamb(), lars(), adafactor(), muon(), own_matrix()}; }

bool is_of_whole_tensors(const Rule& rule) {
  return rule.config.type == OptimizerType::kAdafactor || rule.config.type == OptimizerType::kOwnMatrix;
}

/// Sets the rule with two groups: vectors without decay, whose rates do not depend on norms, and blocks at half the
/// rate.
void with_rule(Strategy& s, const Rule& rule) {
  const StateDType states = s.optimizer.state_dtype;
  s.optimizer = rule.config;
  s.optimizer.state_dtype = states;
  s.optimizer.groups = {
      {.match = {"*"}, .max_dim = 1, .weight_decay = 0.0},
      {.match = {"blocks.*.up.weight", "blocks.*.down.weight"}, .lr_ratio = 0.5, .weight_decay = 0.3}};
  if (adapts_layers(rule.config.type)) s.optimizer.groups[0].layer_adaptation = false;
  s.gradient_clipping = 0;
}

/// The ways in which ranks are joined.
enum class Joined { kThreads, kGloo };
ThreadRanks ranks_of(int ranks, Joined joined) {
  return joined == Joined::kGloo ? over_gloo({.ranks = ranks}) : ThreadRanks{.ranks = ranks};
}

Trained train(const Rule& rule, const Kept& kept, const Placed& placed, const Below* below, const ThreadRanks& ranks,
              bool in_backward) {
  const Adjust adjust = [&](Strategy& s) {
    adjusted_to(kept, below)(s);
    with_rule(s, rule);
    s.optimizer.in_backward = in_backward;
    s.ema.decay = 0.9;
  };
  return train_on_threads(ranks, strategy_for(placed, adjust, kept.param),
                          {.model = kAwkward, .steps = 4, .own_rules = rule.own});
}

constexpr Kept kKinds[] = {{DType::kF32, MasterKind::kSplitBF16, StateDType::kF32},
                           {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32},
                           {DType::kBF16, MasterKind::kF32, StateDType::k8Bit}};

TEST(InBackwardRules, BitsEqualThoseOfUpdatesAfterBackward) {
  const auto exists = [](const Rule& rule, const Placed&, Joined, int, const Kept& kept, const Below*) {
    return kept.state == StateDType::kF32 || !is_of_whole_tensors(rule);  // rules of whole tensors have no other states
  };
  MadeOnce<Trained> after;
  for (const auto& each : pairwise_where(exists, rules(), kOnePerPlacement, std::array{Joined::kThreads, Joined::kGloo},
                                         std::array{1, 2, 3}, kKinds, kInMemoryAndBelow)) {
    const auto& [rule, placed, joined, ranks, kept, below] = each;
    const std::string of = rule.name + ", " + name_of(kept) + " on " + std::to_string(ranks) +
                           (joined == Joined::kGloo ? " over gloo, " : " ranks, ") + name_of(placed);
    const Trained& wanted = after(of, [&each] {
      const auto& [rule, placed, joined, ranks, kept, below] = each;
      return train(rule, kept, placed, nullptr, ranks_of(ranks, joined), /*in_backward=*/false);
    });
    const Trained trained = train(rule, kept, placed, below, ranks_of(ranks, joined), /*in_backward=*/true);
    expect_same_bits(trained, wanted, of + (below ? ", below" : ""));
    // Units wait in the first step for a unit that gets no gradient.
    for (std::size_t step = 1; step < trained.steps.size(); ++step)
      EXPECT_EQ(trained.steps[step].planned, trained.steps[step].allocated) << of << ", step " << step;
  }
}

TEST(InBackwardRules, HaveTheSameBitsOnTwoAxes) {
  constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::kHybridShard, ShardingStrategy::kShardOptimizer,
                                              ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard};
  for (const auto& [rule, kind, shared, over_world] :
       pairwise_of(rules(), kStrategies, std::array{false, true}, std::array{false, true})) {
    const auto train = [&, &rule = rule, &kind = kind, &shared = shared, &over_world = over_world](bool in_backward) {
      Strategy strategy = strategy_for(Placed(kind, shared), [&](Strategy& s) { with_rule(s, rule); });
      strategy.mesh = {2, 2};
      strategy.optimizer.shard_over_world = over_world && kind == ShardingStrategy::kHybridShard;
      strategy.optimizer.in_backward = in_backward;
      return train_on_threads({.ranks = 4}, strategy, {.model = kAwkward, .own_rules = rule.own});
    };
    expect_same_bits(train(true), train(false), rule.name + ", " + name_of(Placed(kind, shared)) + ", two replicas");
  }
}

TEST(InBackwardRules, DiskTrafficEqualsThePlan) {
  static constexpr Below kBelow[] = {{0, 1, 1, 4096, 0, 1}, {1, 1, 1, 4096, 16384, 2}, {1, 0, 0, 4096, 0, 1}};
  for (const auto& [rule, below, dtype] : pairwise_of(rules(), kBelow, std::array{DType::kF32, DType::kBF16})) {
    run_ranks({.ranks = 2}, [&, &rule = rule, &below = below, &dtype = dtype](const Mesh& mesh) {
      const auto adjust = [&](Strategy& s) {
        with_rule(s, rule);
        put_below(s, below);
        s.optimizer.in_backward = true;
      };
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust, dtype), kWide, rule.own);
      expect_planned_disk_traffic(session, rule.name + ", " + std::string(name_of(dtype)));
    });
  }
}

TEST(InBackwardRules, GradientMemoryIsThatOfAFewUnits) {
  for (const Rule& rule : rules()) {
    const auto gradients = [&](bool in_backward) {
      const Adjust adjust = [&](Strategy& s) {
        with_rule(s, rule);
        s.optimizer.in_backward = in_backward;
      };
      const TinyOptions deep{.width = 64, .hidden = 256, .blocks = 24};
      return train_on_threads({.ranks = 2}, strategy_for(ShardingStrategy::kFullShard, adjust),
                              {.model = deep, .steps = 1, .own_rules = rule.own})
          .steps[0]
          .planned[MemoryCategory::kGradients];
    };
    EXPECT_LT(gradients(true) * 2, gradients(false)) << rule.name;
  }
}

// ---- What ranks tell each other ----------------------------------------------------------------------------------

struct Calls {
  std::int64_t calls = 0, bytes = 0;
};
using CallsByLabel = std::map<std::string, Calls>;

class LabelledCalls final : public ForwardingCollectives {
 public:
  LabelledCalls(std::shared_ptr<Collectives> inner, CallsByLabel& calls)
      : ForwardingCollectives(std::move(inner)), calls_(calls) {}
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    note(label, bytes);
    return ForwardingCollectives::all_to_all(label, input, output, bytes);
  }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    note(call.label, call.bytes_per_rank);
    return ForwardingCollectives::do_all_gather(call);
  }

 private:
  void note(std::string_view label, std::size_t bytes) {
    Calls& calls = calls_[std::string(label)];
    ++calls.calls;
    calls.bytes += static_cast<std::int64_t>(bytes);
  }
  CallsByLabel& calls_;
};

/// Returns the calls of each rank's world group in the second step of a new run, by label.
std::vector<CallsByLabel> calls_of_a_step(const Strategy& strategy, const Rule& rule, int ranks) {
  std::mutex mutex;
  std::vector<std::unique_ptr<CallsByLabel>> all;
  thread_local CallsByLabel* own = nullptr;
  const auto wrap = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
    const std::lock_guard lock(mutex);
    all.push_back(std::make_unique<CallsByLabel>());
    own = all.back().get();
    return wrapped_groups(std::move(factory), [mine = own](const std::string& use, auto group) {
      if (use != "world") return std::shared_ptr<Collectives>(std::move(group));
      return std::shared_ptr<Collectives>(std::make_shared<LabelledCalls>(std::move(group), *mine));
    });
  };
  run_ranks({.ranks = ranks, .wrap_groups = wrap}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, kAwkward, rule.own);
    session.train(0);
    own->clear();
    session.train(1);
  });
  std::vector<CallsByLabel> calls;
  for (const auto& each : all) calls.push_back(*each);
  return calls;
}

/// Returns the number of trainable parameters in each unit of kAwkward. The first block is frozen.
std::map<std::string, std::int64_t> trainable_of_units() {
  std::map<std::string, std::int64_t> units;
  std::set<const c10::TensorImpl*> seen;  // a tied parameter has two names
  const Tiny model = make_tiny(kAwkward, /*deferred=*/false);
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const std::string& name = item.key();
    ++units[name.starts_with("blocks.") ? name.substr(0, name.find('.', 7)) : ""];
  }
  return units;
}

TEST(InBackwardRules, LayersOfAUnitCostOneSmallMessage) {
  const std::map<std::string, std::int64_t> units = trainable_of_units();
  ASSERT_GT(units.size(), 2U);
  std::int64_t parameters = 0;
  for (const auto& [unit, count] : units) parameters += count;
  for (const Rule& rule : {lamb(), lars()}) {
    for (const Placed& placed : kInMemory) {
      if (placed.shared) continue;  // this case is left out, since all ranks share one buffer
      const Adjust adjust = [&](Strategy& s) {
        with_rule(s, rule);
        s.optimizer.in_backward = true;
      };
      for (CallsByLabel& calls : calls_of_a_step(strategy_for(placed, adjust), rule, 2)) {
        EXPECT_EQ(calls["layer norms"].calls, std::ssize(units)) << rule.name << ", " << name_of(placed);
        if (placed.kind != ShardingStrategy::kNoShard) continue;
        // Each rank has whole tensors, and two sums of squares for each of them: one of its weights and one of its
        // update.
        EXPECT_EQ(calls["layer norms"].bytes, 2 * 8 * parameters) << rule.name;
      }
    }
  }
}

/// Matrices are sent to their owners and back, separately for each unit.
TEST(InBackwardRules, MatricesOfAUnitAreExchangedByThemselves) {
  const std::size_t units = trainable_of_units().size();
  for (const auto& [rule, of_root] : {std::pair(adafactor(), 1U), {muon(), 0U}, {own_matrix(), 0U}}) {
    for (const Placed& placed : {Placed(ShardingStrategy::kShardGradients), Placed(ShardingStrategy::kFullShard)}) {
      const Adjust adjust = [&, &rule = rule](Strategy& s) {
        with_rule(s, rule);
        s.optimizer.in_backward = true;
      };
      // The root has vectors, which adafactor updates, and an embedding, which the other rules leave to AdamW.
      const auto wanted = static_cast<std::int64_t>(units - 1 + of_root);
      // The parts of three ranks have borders inside matrices.
      for (CallsByLabel& calls : calls_of_a_step(strategy_for(placed, adjust), rule, 3)) {
        EXPECT_EQ(calls["matrices to owners"].calls, wanted) << rule.name << ", " << name_of(placed);
        EXPECT_EQ(calls["matrices from owners"].calls, wanted) << rule.name << ", " << name_of(placed);
      }
    }
  }
}

}  // namespace in_backward_rules_test
}  // namespace tessera::testing
