// Tests "check.replica_hash_every". The comparison finds nothing while the values of ranks are equal. If one bit
// differs, the error names the rank and the parameter.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "tessera/elementwise_optimizer.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"

namespace tessera::testing {
namespace replicas_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Layout {
  ThreadRanks ranks;
  Placed placed;
};
const Layout kWithReplicas[] = {{{.ranks = 3}, ShardingStrategy::kNoShard},
                                {{.ranks = 2}, ShardingStrategy::kShardOptimizer},
                                {{.ranks = 2}, ShardingStrategy::kShardGradients},
                                {{.ranks = 4, .hosts = 2}, ShardingStrategy::kHybridShard},
                                {{.ranks = 4, .hosts = 2}, Placed(ShardingStrategy::kHybridShard, /*shared=*/true)},
                                {{.ranks = 1}, ShardingStrategy::kNoShard}};

TEST(Replicas, HashesAgreeInEveryStep) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const auto& [ranks, placed] : kWithReplicas) {
      for (const Below* below : kInMemoryAndBelow) {
        run_ranks(ranks, [&](const Mesh& mesh) {
          Strategy strategy = strategy_of(kept, placed, below);
          const Values wanted = trained(mesh, strategy, 4, kAwkward);
          strategy.check.replica_hash_every = 1;
          EXPECT_TRUE(all_same_bits(trained(mesh, strategy, 4, kAwkward), wanted))
              << name_of(kept) << ", " << name_of(placed);
        });
      }
    }
  }
}

/// Returns the exception of each rank. Training compares replicas after every third step, and `meddle` changes
/// something after the first step.
std::vector<std::string> told(const Layout& layout, const std::function<void(Session&)>& meddle) {
  std::vector<std::string> texts(static_cast<std::size_t>(layout.ranks.ranks));
  const auto body = [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(layout.placed, [](Strategy& s) { s.check.replica_hash_every = 3; }));
    session.train(0);
    meddle(session);
    session.train(1);
    try {
      session.train(2);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kCorruptData);
      texts[static_cast<std::size_t>(mesh.rank())] = error.message();
    }
  };
  run_ranks(layout.ranks, body);
  return texts;
}

/// Flips the lowest bit of the first element of a parameter in this rank's memory, as a broken machine would.
void flip_bit(Session& session, const std::string& name) {
  auto* const last = session.model->named_parameters()[name].data_ptr<float>();
  std::uint32_t bits = 0;
  std::memcpy(&bits, last, sizeof bits);
  bits ^= 1;
  std::memcpy(last, &bits, sizeof bits);
}

TEST(Replicas, RankWithAFlippedBitIsNamed) {
  const auto flipped_on = [](int rank) {
    return [rank](Session& session) {
      if (session.mesh.rank() == rank) flip_bit(session, "blocks.1.up.weight");
    };
  };
  const auto expect = [](const std::vector<std::string>& texts, const std::string& ranks) {
    for (const std::string& text : texts) {
      EXPECT_THAT(text, AllOf(HasSubstr("after step 3"), HasSubstr("the values of parameter blocks.1.up.weight"),
                              HasSubstr("differ: " + ranks + ". ")));
    }
  };
  const Layout no_shard{{.ranks = 3}, ShardingStrategy::kNoShard};
  expect(told(no_shard, flipped_on(2)), "rank 2");
  expect(told(no_shard, flipped_on(0)), "rank 0");
  // If there are only two ranks, it is unknown which one is right.
  expect(told({{.ranks = 2}, ShardingStrategy::kNoShard}, flipped_on(1)), "ranks 0, 1");
  for (const std::string& text : told(no_shard, [](Session&) {})) EXPECT_EQ(text, "");
}

/// A rule that changes no parameter, and has another number as its state on one rank.
struct OddState final : ElementwiseOptimizer {
  explicit OddState(bool is_odd) : is_odd(is_odd) {}
  std::vector<std::string> states() const override { return {"number"}; }
  void update(Elements& e) const override { e.states[0].fill_(is_odd ? 2.0 : 1.0); }
  bool is_odd;
};

TEST(Replicas, DifferingOptimizerStateIsNamed) {
  std::vector<std::string> texts(3);
  run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard, [](Strategy& s) {
      s.optimizer = {.type = OptimizerType::kOwn};
      s.check.replica_hash_every = 1;
    });
    Tiny model = make_tiny({}, true);
    Engine engine(model.ptr(), strategy, mesh, std::make_shared<OddState>(mesh.rank() == 1));
    const Batch batch = make_batches(1, 24, 5, 17)[0];
    engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
    try {
      engine.step();
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(mesh.rank())] = error.message();
    }
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, AllOf(HasSubstr("master or optimizer state of parameter"), HasSubstr("differ: rank 1. ")));
}

}  // namespace replicas_test
}  // namespace tessera::testing
