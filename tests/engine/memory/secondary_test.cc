// Tests a second copy of sharded parameters inside a host ("secondary"): what is trained, what is planned, and what is
// refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "engine/detailed_plan.h"
#include "engine/memory/make_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace secondary_test {

using ::testing::HasSubstr;

constexpr ShardingStrategy kFull = ShardingStrategy::kFullShard;
const ThreadRanks kTwoHosts{.ranks = 4, .hosts = 2};

Adjust with_copy(SecondaryForm form, const Adjust& more = nullptr) {
  return [=](Strategy& strategy) {
    strategy.secondary.form = form;
    if (more) more(strategy);
  };
}

TEST(SecondCopy, PlainHasTheBitsOfFullShardWithoutIt) {
  struct Case {
    const char* what;
    Adjust adjust;
    DType dtype = DType::kF32;
  };
  const Case cases[] = {
      {"as it is", nullptr},
      {"prefetch 0", [](Strategy& s) { s.prefetch = 0; }},
      {"prefetch 3", [](Strategy& s) { s.prefetch = 3; }},
      {"accumulation in bf16", [](Strategy& s) { s.gradient_accumulation = 2; }, DType::kBF16},
      {"updates in backward", update_in_backward},
      {"values are checked", [](Strategy& s) { s.check.values = true; }},
      {"an average", [](Strategy& s) { s.ema.decay = 0.9; }},
      {"one host, copies of two", [](Strategy& s) { s.secondary.ranks = s.secondary.is_used() ? 2 : 0; }}};
  TrainOptions options;
  options.steps = 3;
  options.batch = 24;
  for (const Case& each : cases) {
    const ThreadRanks ranks = each.what == std::string("one host, copies of two") ? ThreadRanks{.ranks = 4} : kTwoHosts;
    const Trained wanted = train_on_threads(ranks, strategy_for(kFull, each.adjust, each.dtype), options);
    const Strategy strategy = strategy_for(kFull, with_copy(SecondaryForm::kPlain, each.adjust), each.dtype);
    const Trained trained = train_on_threads(ranks, strategy, options);
    expect_same_bits(trained, wanted, each.what);
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << each.what;
    EXPECT_GT(trained.steps[0].planned.total(), wanted.steps[0].planned.total()) << each.what;
  }
}

// The whole step computes with the same rounded values. Neither the number of slots nor reads between calls therefore
// change the bits.
TEST(SecondCopy, Int8TrainsCloseToFullShardWhateverIsGatheredOrShown) {
  constexpr std::size_t kSteps = 3;
  run_ranks(kTwoHosts, [](const Mesh& mesh) {
    const Values exact = trained(mesh, strategy_for(kFull), kSteps);
    FirstValues first;
    for (const std::int64_t prefetch : {0, 1, 3}) {
      const auto ahead = [prefetch](Strategy& s) { s.prefetch = prefetch; };
      const Strategy strategy = strategy_for(kFull, with_copy(SecondaryForm::kInt8, ahead));
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < kSteps; ++i) {
        const at::Tensor loss = session.loss(i);
        if (prefetch == 1) const Gathered look(session.engine);
        session.engine.backward(loss);
        if (prefetch == 1) const Gathered look(session.engine);
        const StepResult result = session.engine.step();
        if (prefetch != 1) {  // a guard holds more units than there are slots
          EXPECT_EQ(result.planned, result.allocated);
        }
      }
      const Values values = session.values();
      EXPECT_TRUE(first.same_bits(values)) << "prefetch " << prefetch;
      const double far = distance(values, exact);
      EXPECT_TRUE(far > 0 && far < 0.03) << "int8 is " << far << " away";  // the bound of rounded_gathers_test.cc
    }
  });
}

TEST(SecondCopy, GuardShowsExactValuesAndForwardSeesWhatAGuardWrote) {
  run_ranks(kTwoHosts, [](const Mesh& mesh) {
    for (const SecondaryForm form : {SecondaryForm::kPlain, SecondaryForm::kInt8}) {
      Session session(mesh, strategy_for(kFull, with_copy(form))), exact(mesh, strategy_for(kFull));
      const Values before = exact.values();
      const double old = session.loss(0).item<double>();  // the copy has all units now
      EXPECT_TRUE(all_same_bits(session.values(), before));
      const auto halve = [](Session& each) {
        const Gathered writes(each.engine, Gathered::kWrite);
        const at::NoGradGuard no_gradients;
        for (at::Tensor& parameter : each.model->parameters()) parameter.mul_(0.5);
      };
      halve(session);
      halve(exact);
      EXPECT_TRUE(all_same_bits(session.values(), exact.values()));
      const double loss = session.loss(0).item<double>(), wanted = exact.loss(0).item<double>();
      EXPECT_NE(old, wanted);
      if (form == SecondaryForm::kPlain) {
        EXPECT_EQ(loss, wanted);
      } else {
        EXPECT_LT(std::abs(loss - wanted), 0.2 * std::abs(old - wanted));
      }
    }
  });
}

TEST(SecondCopy, PlanWithoutRanksEqualsTheEnginesPlan) {
  Topology topology;
  topology.world_size = kTwoHosts.ranks;
  topology.local_world_size = 2;
  topology.launcher = "thread";
  Tiny shapes = make_tiny({}, true);
  const MemoryPlan without = plan_in_detail(*shapes, strategy_for(kFull), topology);
  for (const SecondaryForm form : {SecondaryForm::kPlain, SecondaryForm::kInt8}) {
    const Strategy strategy = strategy_for(kFull, with_copy(form));
    const MemoryPlan planned = plan_in_detail(*shapes, strategy, topology);
    const MemoryUse use = planned.use(), less = without.use();
    EXPECT_EQ(use.total() - less.total(), planned.secondary_bytes() + planned.secondary_codes_bytes());
    if (form == SecondaryForm::kPlain) {  // a rank has a quarter of the parameters, and copies half, without the root
      const std::int64_t root = planned.units()[0].gathered_bytes();
      EXPECT_GT(root, 0);
      EXPECT_EQ(planned.secondary_bytes(), 2 * less[MemoryCategory::kParameters] - root / 2);
    }
    run_ranks(kTwoHosts, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      EXPECT_EQ(session.engine.plan().use.bytes, use.bytes);
    });
  }
}

TEST(SecondCopy, LimitThatItExceedsIsKeptWithoutIt) {
  Topology topology;
  topology.world_size = 8;
  topology.local_world_size = 4;
  topology.launcher = "thread";
  Tiny shapes = make_tiny({}, true);
  const std::int64_t limit = plan_in_detail(*shapes, strategy_for(kFull), topology).use().limited();
  const Strategy strategy = strategy_for(kFull, with_copy(SecondaryForm::kPlain));
  const MemoryPlan plan = plan_in_detail(*shapes, strategy, topology);
  EXPECT_GT(plan.use().limited(), limit);
  EXPECT_THAT(next_cheaper(plan, strategy, /*shares_memory=*/false, limit), HasSubstr(" without \"secondary\" with "));
}

TEST(SecondCopy, RanksThatCannotHoldOneAreRefused) {
  Topology topology;
  topology.launcher = "thread";
  const auto refusal = [&](int world, int of_host, const Adjust& adjust) {
    topology.world_size = world;
    topology.local_world_size = of_host;
    Tiny shapes = make_tiny({}, true);
    const Strategy strategy = strategy_for(kFull, with_copy(SecondaryForm::kPlain, adjust));
    return error_of([&] { plan_in_detail(*shapes, strategy, topology); });
  };
  EXPECT_EQ(refusal(8, 4, nullptr), "");
  EXPECT_EQ(refusal(8, 4, [](Strategy& s) { s.secondary.ranks = 2; }), "");
  EXPECT_THAT(refusal(4, 4, nullptr), HasSubstr("/secondary/ranks: a second copy is held by a number of ranks"));
  EXPECT_THAT(refusal(4, 1, nullptr), HasSubstr("got 1, those of a host"));
  EXPECT_THAT(refusal(8, 4, [](Strategy& s) { s.secondary.ranks = 3; }), HasSubstr("got 3"));
  EXPECT_THAT(refusal(8, 4, [](Strategy& s) { s.secondary.ranks = 8; }), HasSubstr("got 8"));
  EXPECT_THAT(refusal(4, 4, [](Strategy& s) { s.host_sharing = true; }), HasSubstr("share, and gather nothing"));
  const auto on_gpus = [](SecondaryForm form) {
    return [form](Strategy& s) {
      s.secondary.form = form;
      s.comm.transport = TransportChoice::kNccl;
    };
  };
  EXPECT_EQ(refusal(8, 4, on_gpus(SecondaryForm::kPlain)), "");
  EXPECT_THAT(refusal(8, 4, on_gpus(SecondaryForm::kInt8)),
              HasSubstr("/secondary/form: \"int8\" is rounded by the CPU"));
}

TEST(SecondCopy, UnequalHostsNeedTheNumberOfItsRanks) {
  Topology topology;
  topology.launcher = "thread";
  topology.world_size = 8;
  topology.put_on_hosts({2, 6});
  const auto refusal = [&](std::int64_t ranks) {
    Tiny shapes = make_tiny({}, true);
    const Strategy strategy =
        strategy_for(kFull, with_copy(SecondaryForm::kPlain, [ranks](Strategy& s) { s.secondary.ranks = ranks; }));
    return error_of([&] { plan_in_detail(*shapes, strategy, topology); });
  };
  EXPECT_THAT(refusal(0), HasSubstr("hosts hold unequal numbers of ranks"));
  EXPECT_THAT(refusal(0), HasSubstr("hint: give \"ranks\""));
  EXPECT_EQ(refusal(2), "");
}

}  // namespace secondary_test
}  // namespace tessera::testing
