// Tests programs that read and write parameters under the Gathered guard.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace gathered_test {

using ::testing::HasSubstr;

TEST(Gathered, GuardGivesPointersAndKeepsWrites) {
  on_each_placement(3, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.train(0);
    at::Tensor weight = session.model->head;
    const std::int64_t numel = weight.numel();
    {
      Gathered guard(session.engine, Gathered::kWrite);
      auto* values = weight.mutable_data_ptr<float>();
      // Only changes by rank 0 count. Changes by other ranks are overwritten.
      for (std::int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>(mesh.rank() == 0 ? i : -1);
      guard.close();
    }
    {
      const Gathered guard(session.engine, {weight});
      for (std::int64_t i = 0; i < numel; ++i) ASSERT_EQ(weight.const_data_ptr<float>()[i], static_cast<float>(i));
    }
    // An operator that reads the parameter sees the same values, and training continues from these values.
    EXPECT_EQ(weight.detach().sum().item<double>(), static_cast<double>(numel * (numel - 1) / 2));
    const StepResult result = session.train(1);
    EXPECT_FALSE(result.overflow);
    EXPECT_EQ(result.planned, session.engine.allocated());
    const Gathered guard(session.engine, {weight});
    EXPECT_NEAR(weight.const_data_ptr<float>()[numel - 1], static_cast<double>(numel - 1), 0.1);
  });
}

// Head and embedding share a flat buffer, and each of them is exactly one half of it. A write to one half must not look
// like a load of values in a wider dtype.
TEST(Gathered, WritesToAParameterOfHalfItsBufferAreKept) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy, {.vocab = 32, .width = 32});
    {
      Gathered guard(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_grad;
      session.model->head.fill_(0.5);
      guard.close();
    }
    EXPECT_EQ(session.model->head.detach().sum().item<double>(), 0.5 * 32 * 32);
  });
}

// A parameter may be given a view of its own memory, or of another parameter's in the same unit or in another unit. No
// value is overwritten before it is stored.
TEST(Gathered, GivenViewsOfParametersAreKept) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy, {.vocab = 32, .width = 32});
    session.train(0);
    const auto block = [&](std::size_t i) { return session.model->blocks->ptr<BlockImpl>(i); };
    const std::vector<at::Tensor> given = {session.model->head, block(0)->up->weight, block(1)->up->weight,
                                           block(0)->norm->weight, block(0)->norm->bias};
    std::vector<at::Tensor> before;
    for (const at::Tensor& each : given) before.push_back(each.detach().clone());
    {
      Gathered guard(session.engine, Gathered::kWrite);
      at::Tensor(given[0]).set_data(given[0].detach().t());
      for (const std::size_t i : {1u, 3u}) {
        const at::Tensor first = given[i].detach();
        at::Tensor(given[i]).set_data(given[i + 1].detach());
        at::Tensor(given[i + 1]).set_data(first);
      }
      guard.close();
    }
    const std::vector<at::Tensor> wanted = {before[0].t(), before[2], before[1], before[4], before[3]};
    for (std::size_t i = 0; i < given.size(); ++i) EXPECT_TRUE(given[i].detach().equal(wanted[i])) << i;
    session.train(1);
  });
}

TEST(Gathered, GivenMemoryOfOtherRanksIsReplacedByRankZeros) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    at::Tensor head = session.model->head;
    {
      Gathered guard(session.engine, Gathered::kWrite);
      head.set_data(at::full(head.sizes(), 0.5 + mesh.rank()));
      guard.close();
    }
    EXPECT_TRUE(head.detach().eq(0.5).all().item<bool>()) << "rank " << mesh.rank();
    session.train(0);
  });
}

TEST(Gathered, PointerWithoutGatheredIsRefusedWhereParametersAreSharded) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    session.train(0);
    EXPECT_THROW(session.model->head.const_data_ptr<float>(), c10::Error);
  });
}

// Operators gather in advance, in the order of the last round. All ranks must do this in the same way, even if only one
// rank reads.
TEST(Gathered, OneRankAloneMayReadGuardedParameters) {
  on_each_placement(3, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    for (std::size_t step = 0; step < 3; ++step) {
      session.train(step);
      for (const at::Tensor& parameter : session.model->parameters()) {
        Gathered guard(session.engine, {parameter});
        if (mesh.rank() == 0) {
          EXPECT_GE(parameter.detach().norm().item<double>(), 0);
        }
        guard.close();
      }
    }
  });
}

// Steps are so small that most bf16 values do not change while their masters do. A write that does not keep the masters
// would lose these small changes.
TEST(Gathered, WriteThatChangesNothingKeepsMastersExact) {
  const Adjust small_steps = [](Strategy& s) { s.optimizer.lr = 1e-5; };
  const auto train = [](Session& session, bool write) {
    for (std::size_t i = 0; i < 40; ++i) {
      session.train(i);
      if (write && i % 5 == 0) Gathered(session.engine, Gathered::kWrite).close();
    }
    return session.values();
  };
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session untouched(mesh, strategy), written(mesh, strategy), start(mesh, strategy);
        const Values wanted = train(untouched, false);
        EXPECT_TRUE(all_same_bits(train(written, true), wanted));
        EXPECT_FALSE(all_same_bits(start.values(), wanted))
            << "the masters never moved a value: the test shows nothing";
      },
      small_steps, DType::kBF16);
}

// Guards between steps hold more units than there are slots, so some of these units lie in memory that is not in the
// plan.
TEST(Gathered, GuardsBetweenStepsDisturbNothing) {
  const TinyOptions model{.blocks = 5};
  const auto last_blocks = [](Session& session) {
    std::vector<at::Tensor> parameters;
    for (std::size_t block : {2, 3, 4}) {
      parameters.push_back(session.model->blocks->ptr<BlockImpl>(block)->up->weight);
    }
    return parameters;
  };
  on_each_placement(2, [&](const Mesh& mesh, const Strategy& strategy) {
    Session looked_at(mesh, strategy, model), untouched(mesh, strategy, model);
    for (std::size_t i = 0; i < 4; ++i) {
      looked_at.train(i), untouched.train(i);
      { const Gathered guard(looked_at.engine, last_blocks(looked_at)); }
      EXPECT_EQ(looked_at.engine.allocated(), looked_at.engine.plan().use) << "a guard kept memory beyond the plan";
    }
    EXPECT_TRUE(all_same_bits(looked_at.values(), untouched.values()));
  });
}

}  // namespace gathered_test
}  // namespace tessera::testing
