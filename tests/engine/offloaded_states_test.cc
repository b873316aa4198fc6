// Masters and optimizer states on disk: training has the bits of the run without, memory and traffic are the plan's, and
// what a program does around a step (write parameters, freeze, end the Engine) reaches the disk too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct Kept {
  DType param;
  MasterKind master;
  StateDType state;
};
constexpr Kept kKept[] = {
    {DType::kF32, MasterKind::kSplitBF16, StateDType::kF32},  {DType::kF32, MasterKind::kSplitBF16, StateDType::k8Bit},
    {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, {DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16},
    {DType::kBF16, MasterKind::kF32, StateDType::k8Bit},      {DType::kF16, MasterKind::kF32, StateDType::kF32}};

std::string name_of(const Kept& kept) {
  return std::string(tessera::name_of(kept.param)) + (kept.master == MasterKind::kF32 ? ", whole masters, " : ", ") +
         tessera::name_of(kept.state);
}

/// What lies on disk, and how little memory moves it.
struct Below {
  double masters, moments;
  std::int64_t record_bytes, cache_bytes, queue_depth;
};
constexpr Below kBelow[] = {{1, 1, 4096, 0, 1},       // everything, as many records as can be
                            {1, 1, 16384, 20000, 2},  // some of it cached
                            {0.5, 0.3, 4096, 0, 3},   // records with masters and without
                            {0, 1, 4 << 20, 0, 4}};   // a record a group

void put_below(Strategy& s, const Below& below) {
  const auto state = [](double fraction) {
    return fraction > 0 ? OffloadedState{Tier::kNvme, fraction} : OffloadedState{};
  };
  s.offload.masters = state(below.masters);
  s.offload.moments = state(below.moments);
  s.offload.paths = {std::filesystem::temp_directory_path().string()};
  s.offload.record_bytes = below.record_bytes;
  s.offload.cache_bytes = below.cache_bytes;
  s.offload.queue_depth = below.queue_depth;
}

Adjust adjusted_to(const Kept& kept, const Below* below) {
  return [&kept, below](Strategy& s) {
    s.mixed_precision.master = kept.master;
    s.optimizer.state_dtype = kept.state;
    if (below) put_below(s, *below);
  };
}

Strategy strategy_of(const Kept& kept, const Placed& placed, const Below* below = nullptr) {
  return strategy_for(placed, adjusted_to(kept, below), kept.param);
}

// Wide enough for several records a group; a frozen block, an unused one and a tied head cut runs inside records.
constexpr TinyOptions kWide{.vocab = 32, .width = 32, .hidden = 64};
constexpr TinyOptions kAwkward{
    .vocab = 32, .width = 32, .hidden = 64, .tied_head = true, .frozen_first_block = true, .unused_block = true};

TEST(Offload, TrainingHasTheBitsOfTheRunWithout) {
  for (const Kept& kept : kKept) {
    for (const TinyOptions& model : {kWide, kAwkward}) {
      for (int ranks : {1, 2, 3}) {
        for (const Placed& placed : kOnePerPlacement) {
          const TrainOptions options{.model = model, .steps = 5};
          const Trained wanted = train_on_threads({.ranks = ranks}, strategy_of(kept, placed), options);
          for (const Below& below : kBelow) {
            const std::string what = name_of(kept) + ", " + name_of(placed) + " on " + std::to_string(ranks) +
                                     " ranks, records of " + std::to_string(below.record_bytes);
            const Trained trained = train_on_threads({.ranks = ranks}, strategy_of(kept, placed, &below), options);
            expect_same_bits(trained, wanted, what);
            for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
          }
        }
      }
    }
  }
}

TEST(Offload, AccumulationAndOverflowsChangeNothing) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    const auto train = [&](bool offloads) {
      return train_on_threads({.ranks = 2},
                              strategy_for(
                                  ShardingStrategy::kFullShard,
                                  [&](Strategy& s) {
                                    s.gradient_accumulation = 2;
                                    s.mixed_precision.loss_scale.initial = 4294967296.0;  // the first steps overflow
                                    if (offloads) put_below(s, kBelow[0]);
                                  },
                                  dtype),
                              {.model = kWide, .steps = 24});
    };
    const Trained wanted = train(false);
    EXPECT_EQ(wanted.steps.front().overflow, dtype == DType::kF16);
    EXPECT_FALSE(wanted.steps.back().overflow);
    expect_same_bits(train(true), wanted, std::string(tessera::name_of(dtype)));
  }
}

TEST(Offload, AutoFitsTheLimitAndKeepsTheBits) {
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  const TrainOptions options{.model = kWide, .steps = 5};
  const Trained wanted = train_on_threads({.ranks = 2}, strategy_of(kept, ShardingStrategy::kFullShard), options);
  const std::int64_t all = wanted.steps[0].planned.total();
  for (const double share : {1.0, 0.9, 0.7}) {
    Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard, &kBelow[0]);
    strategy.offload.masters.tier = strategy.offload.moments.tier = Tier::kAuto;
    strategy.memory.limit_bytes = static_cast<std::int64_t>(share * static_cast<double>(all));
    const Trained trained = train_on_threads({.ranks = 2}, strategy, options);
    expect_same_bits(trained, wanted, std::to_string(share));
    EXPECT_LE(trained.steps[0].planned.total(), strategy.memory.limit_bytes);
    EXPECT_EQ(trained.traffic.disk_bytes_written > 0, share < 1.0) << share;
  }
}

TEST(Offload, BytesMovedAreThePlans) {
  for (const Kept& kept : kKept) {
    for (const Below& below : kBelow) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_of(kept, ShardingStrategy::kFullShard, &below), kWide);
        expect_planned_disk_traffic(session, name_of(kept) + ", records of " + std::to_string(below.record_bytes));
      });
    }
  }
}

TEST(Offload, MastersBelowAreWrittenByGathered) {
  for (const Kept& kept : kKept) {
    std::optional<Values> wanted;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[0]}) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kWide);
            for (std::size_t i = 0; i < 2; ++i) session.train(i);
            {
              Gathered guard(session.engine, Gathered::kWrite);
              const torch::NoGradGuard no_grad;
              for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(1.001953125);
            }
            for (std::size_t i = 2; i < 4; ++i) session.train(i);
            const Values values = session.values();
            if (mesh.rank() != 0) return;
            if (!wanted) wanted = values;
            EXPECT_TRUE(all_same_bits(values, *wanted)) << name_of(kept);
          },
          adjusted_to(kept, below), kept.param);
    }
  }
}

TEST(Offload, TheNextEngineTakesMastersFromTheDisk) {
  for (const Kept& kept : kKept) {
    std::optional<Values> wanted;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[0], &kBelow[2]}) {
      for (const Placed& placed : kOnePerPlacement) {
        run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
          const Strategy strategy = strategy_of(kept, placed, below);
          Tiny model = make_tiny(kWide, true);
          const std::vector<Batch> batches = make_batches(6, 24, 5, kWide.vocab);
          const auto train = [&](Engine& engine, std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) {
              engine.backward(model->forward(rows_of(batches[i].tokens, mesh), rows_of(batches[i].targets, mesh)));
              engine.step();
            }
          };
          {
            Engine first(model.ptr(), strategy, mesh);
            train(first, 0, 3);
          }
          Engine second(model.ptr(), strategy, mesh);
          train(second, 3, 6);
          const Gathered guard(second);
          if (mesh.rank() != 0) return;
          const Values values = values_of(*model);
          if (!wanted) wanted = values;
          EXPECT_TRUE(all_same_bits(values, *wanted)) << name_of(kept) << ", " << name_of(placed);
        });
      }
    }
  }
}

TEST(Offload, StatesAreCarriedWhenWhatTrainsChanges) {
  for (const Kept& kept : kKept) {
    std::optional<Values> wanted;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[2]}) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kWide);
            for (std::size_t i = 0; i < 2; ++i) session.train(i);
            session.engine.set_trainable("*.weight", false);
            for (std::size_t i = 2; i < 4; ++i) session.train(i);
            session.engine.set_trainable("*.weight", true);
            for (std::size_t i = 4; i < 6; ++i) session.train(i);
            const Values values = session.values();
            if (mesh.rank() != 0) return;
            if (!wanted) wanted = values;
            EXPECT_TRUE(all_same_bits(values, *wanted)) << name_of(kept);
          },
          adjusted_to(kept, below), kept.param);
    }
  }
}

std::string refusal_of(const std::string& path) {
  try {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[0], ShardingStrategy::kFullShard, &kBelow[0]);
      strategy.offload.paths = {path};
      Session session(mesh, strategy, kWide);
    });
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(Offload, ADirectoryThatCannotBeUsedIsRefusedBeforeTraining) {
  EXPECT_THAT(refusal_of("/nowhere/at/all"), HasSubstr("/nowhere/at/all"));
  EXPECT_THAT(refusal_of("/proc/version"), HasSubstr("/proc/version"));
}

}  // namespace
}  // namespace tessera::testing
