// Tests values that are all-gathered after the update (sharding/gather/publication.h), and units that are gathered
// before the next forward begins (Residency::gather_ahead). Training has the same bits as when values are waited for at
// once, whatever a program does between two steps.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/wrapped_groups.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace publication_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The status with which all gathers of this thread end; OK: gathers are not disturbed.
thread_local absl::Status gathers_end_with;

/// Lets all-gathers run in the background: the values arrive only when a thread waits for them.
class GathersBehind final : public ForwardingCollectives {
 public:
  using ForwardingCollectives::ForwardingCollectives;

  bool gathers_in_background() const override { return true; }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    std::vector<char> all(static_cast<std::size_t>(size()) * call.bytes_per_rank);
    GatherCall elsewhere = call;
    elsewhere.full = all.data();
    const absl::Status status = ForwardingCollectives::do_all_gather(elsewhere).wait();
    if (!status.ok()) return Work(status);
    const auto* const mine = static_cast<const char*>(call.shard);
    return Work(std::make_unique<Coming>(std::move(all), mine, call.bytes_per_rank, static_cast<char*>(call.full)));
  }

 private:
  struct Coming : Work::State {
    Coming(std::vector<char> all, const char* mine, std::size_t bytes, char* full)
        : all_(std::move(all)), mine_(mine), sent_(mine, mine + bytes), full_(full) {}
    /// This rank's part is being sent until this wait ends, so no thread may write to that part.
    absl::Status wait() override {
      if (!gathers_end_with.ok()) return gathers_end_with;
      EXPECT_EQ(std::memcmp(mine_, sent_.data(), sent_.size()), 0) << "written while it was on its way";
      std::memcpy(full_, all_.data(), all_.size());
      return absl::OkStatus();
    }
    const std::vector<char> all_;
    const char* const mine_;
    const std::vector<char> sent_;
    char* const full_;
  };
};

ThreadRanks behind(int ranks) {
  return {.ranks = ranks, .wrap_groups = [](std::shared_ptr<GroupFactory> groups) {
            return wrapped_groups(std::move(groups), [](const std::string& use, auto group) {
              if (use != "gather") return group;
              return std::shared_ptr<Collectives>(std::make_shared<GathersBehind>(std::move(group)));
            });
          }};
}

/// Two of these strategies publish values after the update, and two gather units before the next forward.
const ShardingStrategy kBehind[] = {ShardingStrategy::kShardOptimizer, ShardingStrategy::kShardGradients,
                                    ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard};

/// A program that does something between steps. `folder`: a folder that all ranks of a run share.
using Body = std::function<void(Session& session, const std::string& folder)>;
void expect_same_values(int ranks, const Strategy& strategy, const Body& body, TinyOptions model = {}) {
  const auto values_after = [&](const ThreadRanks& on) {
    const TestFolder folder;
    return of_rank_zero(on, [&](const Mesh& mesh) {
      Session session(mesh, strategy, model);
      body(session, folder.path().string());
      return session.values();
    });
  };
  const Values wanted = values_after({.ranks = ranks});
  ASSERT_FALSE(wanted.empty());
  EXPECT_TRUE(all_same_bits(values_after(behind(ranks)), wanted));
}

void expect_same_values(const Body& body, const Adjust& adjust = nullptr) {
  for (const ShardingStrategy kind : kBehind) {
    SCOPED_TRACE(name_of(Placed(kind)));
    expect_same_values(2, strategy_for(kind, adjust), body);
  }
}

void train(Session& session, std::size_t first, std::size_t end) {
  for (std::size_t i = first; i < end; ++i) session.train(i);
}

TEST(Publication, LatePublicationChangesNoBits) {
  const TinyOptions models[] = {{},
                                {.tied_head = true, .frozen_first_block = true},
                                {.unused_block = true, .shared_block = true},
                                {.recompute = true}};
  for (const auto& [kind, dtype, ranks, model] :
       pairwise_of(kBehind, std::array{DType::kF32, DType::kBF16}, std::array{1, 2, 3, 4}, models)) {
    SCOPED_TRACE(name_of(Placed(kind)) + " on " + std::to_string(ranks));
    expect_same_values(
        ranks, strategy_for(kind, nullptr, dtype), [](Session& session, const std::string&) { train(session, 0, 5); },
        model);
  }
}

TEST(Publication, BitsAreTheSameWithTwoAxesAccumulationAndRules) {
  const Adjust kinds[] = {[](Strategy& s) { s.mesh.replicate = 2; },
                          [](Strategy& s) { s.gradient_accumulation = 2; },
                          [](Strategy& s) { s.optimizer.type = OptimizerType::kMuon; },
                          [](Strategy& s) { s.optimizer.type = OptimizerType::kLamb; },
                          [](Strategy& s) { update_in_backward(s); },
                          [](Strategy& s) { s.check.replica_hash_every = 2; },
                          [](Strategy& s) {
                            s.offload.moments = {Tier::kNvme, 0.5};
                            s.offload.record_bytes = 4096;
                            s.offload.paths = {std::filesystem::temp_directory_path().string()};
                          }};
  for (const Adjust& adjust : kinds) {
    for (const ShardingStrategy kind : std::span(kBehind).first(2))
      expect_same_values(4, strategy_for(kind, adjust),
                         [](Session& session, const std::string&) { train(session, 0, 5); });
  }
}

// A rank that reads alone gets both ranks' parts, since both ranks have sent them.
TEST(Publication, OneRankMayReadAlone) {
  run_ranks(behind(2), [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kShardGradients));
    train(session, 0, 2);
    double sum = 0;
    const at::NoGradGuard no_grad;
    if (mesh.rank() == 1) {
      for (const at::Tensor& parameter : session.model->parameters()) sum += parameter.sum().item<double>();
    }
    double wanted = 0;
    const Gathered gathered(session.engine);
    for (const at::Tensor& parameter : session.model->parameters()) wanted += parameter.sum().item<double>();
    EXPECT_EQ(sum, mesh.rank() == 1 ? wanted : 0);
  });
}

TEST(Publication, RawPointerIsRefusedUntilTheValuesArrive) {
  run_ranks(behind(2), [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kShardGradients));
    session.train(0);
    const at::Tensor head = session.model->head;
    EXPECT_THAT(error_of([&] { static_cast<void>(head.data_ptr()); }), AllOf(HasSubstr("head"), HasSubstr("Gathered")));
    const double first = head.flatten()[0].item<double>();
    EXPECT_EQ(*head.data_ptr<float>(), static_cast<float>(first));
    session.train(1);
  });
}

TEST(Publication, CallsBetweenStepsSeeTheNewValues) {
  expect_same_values([](Session& session, const std::string&) {
    train(session, 0, 2);
    const std::vector<std::size_t> batches = {0, 1};
    EXPECT_GT(session.engine.evaluate(batches, [&](std::size_t i) { return session.loss(i); }).loss, 0);
    train(session, 2, 3);
    {
      Gathered gathered(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(0.5);
    }
    train(session, 3, 4);
    session.engine.zero_grad();
    train(session, 4, 5);
  });
}

TEST(Publication, AveragesAreSwappedOnlyAfterValuesArrive) {
  expect_same_values(
      [](Session& session, const std::string&) {
        train(session, 0, 3);
        { const Gathered average(session.engine, Gathered::kEma); }
        train(session, 3, 4);
        {
          const EmaWeights weights(session.engine);
          const at::NoGradGuard no_grad;
          static_cast<void>(session.loss(1));
        }
        train(session, 4, 6);
      },
      [](Strategy& s) { s.ema.decay = 0.9; });
}

TEST(Publication, CheckpointHoldsTheNewValues) {
  expect_same_values([](Session& session, const std::string& folder) {
    train(session, 0, 2);
    const std::string saved = save_checkpoint(session.engine, folder);
    train(session, 2, 4);
    load_checkpoint(session.engine, saved);
    train(session, 2, 3);
  });
}

TEST(Publication, FreezingAndUnfreezingCarriesTheNewValues) {
  expect_same_values([](Session& session, const std::string&) {
    train(session, 0, 2);
    session.engine.set_trainable("head", false);
    train(session, 2, 3);
    session.engine.set_trainable("head", true);
    train(session, 3, 5);
  });
}

TEST(Publication, UnitsMayBeReadInAnotherOrderThanSent) {
  expect_same_values([](Session& session, const std::string&) {
    session.train(0);
    const std::vector<at::Tensor> parameters = session.model->parameters();
    for (std::size_t i = parameters.size(); i-- > 0;) static_cast<void>(parameters[i].sum().item<double>());
    train(session, 1, 3);
  });
}

absl::Status lost() { return make_error(ExitCode::kPeerLost, "rank 1/2: gone"); }

TEST(Publication, ReadingValuesThatNeverArriveIsAnError) {
  for (const bool by_operator : {true, false}) {
    run_ranks(behind(2), [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kShardGradients));
      session.train(0);
      gathers_end_with = lost();
      const std::string error =
          error_of([&] { by_operator ? static_cast<void>(session.loss(1)) : static_cast<void>(session.values()); });
      EXPECT_THAT(error, HasSubstr("rank 1/2: gone"));
      EXPECT_THAT(error_of([&] { session.train(1); }), HasSubstr("rank 1/2: gone"));
      gathers_end_with = absl::OkStatus();
    });
  }
}

// If some of the values are missing, the parts belong to two different steps.
TEST(Publication, MissingValuesCannotBeReadAfterTheEngine) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    run_ranks(behind(2), [&](const Mesh& mesh) {
      Tiny model = make_tiny({}, true);
      {
        Engine engine(model.ptr(), strategy_for(ShardingStrategy::kShardGradients, nullptr, dtype), mesh);
        const Batch batch = make_batches(1, 4, 5, TinyOptions().vocab)[0];
        engine.backward(model->forward(batch.tokens, batch.targets));
        engine.step();
        gathers_end_with = lost();
      }
      gathers_end_with = absl::OkStatus();
      for (const at::Tensor& parameter : model->parameters())
        EXPECT_THAT(error_of([&] { static_cast<void>(parameter.sum()); }), HasSubstr("an Engine that is gone"));
    });
  }
}

}  // namespace publication_test
}  // namespace tessera::testing
