// Tests which units are gathered, when they are gathered and released, and what remains after a gather that fails.

#include "sharding/gather/residency.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>

#include "hand_made_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/observe_pointers.h"

namespace tessera::testing {
namespace {

struct Resident {
  Resident(const Mesh& mesh, const HandMadeUnits::Options& options)
      : units(mesh, options),
        residency(units.plan(), units.pointers(), *units.axes().gather, {std::move(units.slots), {}}, log,
                  [this](const Error& error) { failure = error.message(); }) {}

  void use(std::size_t u) { residency.use(units.unit(u)); }
  void unpin(std::size_t u) { residency.unpin(units.unit(u)); }
  void use_once(std::size_t u) {
    use(u);
    expect_values(u);
    unpin(u);
  }
  void expect_values(std::size_t u, float changed_by = 0.0f) {
    for (std::size_t i = 0; i < units.group(u).parameters.size(); ++i) {
      const at::Tensor wanted = HandMadeUnits::values_of(u, i, units.group(u).parameters[i].sizes) + changed_by;
      EXPECT_TRUE(at::equal(units.parameter(u, i).detach(), wanted)) << "unit " << u << ", parameter " << i;
    }
  }
  int gathered() {
    int count = 0;
    for (Unit* unit : units.pointers()) count += unit->state() != Unit::State::kReleased ? 1 : 0;
    return count;
  }

  HandMadeUnits units;
  std::optional<std::string> failure;
  GatherLog log{1};
  Residency residency;
};

HandMadeUnits::Options options_of(std::size_t count, std::int64_t prefetch) {
  HandMadeUnits::Options options = some_units(count);
  options.prefetch = prefetch;
  return options;
}

TEST(Residency, UsedUnitHoldsItsValuesInAnyOrder) {
  for (const int ranks : {2, 3}) {
    for (const std::int64_t prefetch : {0, 1, 3}) {
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        Resident resident(mesh, options_of(7, prefetch));
        std::mt19937 random(5);  // every rank has the same seed
        for (int round = 0; round < 6; ++round) {
          // Some rounds repeat earlier rounds, and the other rounds are new.
          std::mt19937 order(round % 3 == 0 ? 77u : random());
          for (int k = 0; k < 30; ++k) {
            resident.use_once(order() % 7);
            EXPECT_LE(resident.gathered(), 1 + resident.units.plan().slots().shared_slots);
          }
          resident.residency.end_round();
          if (round % 2 == 0) resident.residency.release_all();
        }
        EXPECT_EQ(resident.residency.counts().overflow_slots, 0);
      });
    }
  }
}

// The storage that profilers see is as large as the largest unit that a profiler has observed so far.
TEST(Residency, ObservedPointersWorkForUnitsOfAnySize) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    HandMadeUnits::Options options = options_of(3, 0);
    options.sizes[2] = {{900, 700}};  // larger than the memory that is shown for a small unit
    Resident resident(mesh, options);
    observe_pointers(true);
    for (std::size_t u : {0u, 1u, 2u}) {
      EXPECT_TRUE(is_in_place(resident.units.group(u), 0)) << u;
      EXPECT_TRUE(std::isnan(resident.units.parameter(u, 0).detach().const_data_ptr<float>()[0])) << u;
    }
    resident.use_once(2);
    EXPECT_TRUE(is_in_place(resident.units.group(2), 0));
    observe_pointers(false);
    EXPECT_TRUE(resident.units.axes().control->barrier("neither looks").wait().ok());  // ranks are threads here
    EXPECT_ANY_THROW(resident.units.parameter(2, 0).detach().data_ptr());
  });
}

TEST(Residency, PinnedUnitsKeepValuesAndOthersGetOverflowSlots) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(6, 0));  // the root has its own slot, and all other units share one slot
    for (const std::size_t u : {1u, 2u, 3u, 0u}) resident.use(u);
    for (const std::size_t u : {0u, 1u, 2u, 3u}) resident.expect_values(u);
    const ResidencyCounts& counts = resident.residency.counts();
    EXPECT_EQ(counts.overflow_slots, 2);
    EXPECT_EQ(counts.overflow_bytes, resident.units.unit(2).gathered_bytes() + resident.units.unit(3).gathered_bytes());
    resident.residency.give_back_overflow();
    EXPECT_GT(counts.overflow_bytes, 0) << "they are pinned";
    for (const std::size_t u : {0u, 1u, 2u, 3u}) resident.unpin(u);
    resident.residency.give_back_overflow();
    EXPECT_EQ(counts.overflow_bytes, 0);
    resident.use_once(2);
  });
}

// Units 1, 2, 3 and 4 take turns in two slots, and the unit whose next use is last is released (Belady's rule).
TEST(Residency, KnownOrderIsPrefetchedWithoutExtraGathers) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(5, 1));
    const std::size_t order[] = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0};
    std::int64_t gathers_before = 0;
    for (int step = 0; step < 4; ++step) {
      for (const std::size_t u : order) resident.use_once(u);
      resident.residency.end_round();
      const ResidencyCounts& counts = resident.residency.counts();
      // The root is gathered once, and forward gathers 4 units. Backward finds units 4 and 3 in memory, and gathers
      // units 2 and 1.
      EXPECT_EQ(counts.gathers - gathers_before, 1 + 4 + 2) << "step " << step;
      if (step > 0) {
        EXPECT_GT(counts.prefetched, 0);
      }
      gathers_before = counts.gathers;
      EXPECT_EQ(resident.log.entries().size(), 7u);
      resident.log.reset();
      resident.residency.release_all();
    }
    // Each of the three later steps prefetched six of its seven gathers, which are all except the first.
    EXPECT_EQ(resident.residency.counts().prefetched, 3 * 6);
  });
}

// The recorded order of the second round must also begin with unit 1. Otherwise the third round would begin in the
// middle of this order.
TEST(Residency, RoundMayBeginWithTheLastRoundsFinalUnit) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(6, 1));
    const std::size_t round[] = {1, 2, 3, 4, 5, 4, 3, 2, 1};
    std::vector<std::int64_t> gathers;
    for (int step = 0; step < 4; ++step) {
      const std::int64_t before = resident.residency.counts().gathers;
      for (int microbatch = 0; microbatch < 2; ++microbatch) {
        for (const std::size_t u : round) resident.use_once(u);
        resident.residency.end_round();
      }
      resident.residency.release_all();
      gathers.push_back(resident.residency.counts().gathers - before);
    }
    // The second round finds units 1 and 2 in the two slots. No unit is gathered unless it is used.
    EXPECT_EQ(gathers[2], gathers[3]);
    EXPECT_EQ(gathers[3], 8 + 6);
  });
}

TEST(Residency, NextUseAfterReleaseAllSeesChangedShards) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Resident resident(mesh, some_units(3, strategy));
      for (const std::size_t u : {0u, 1u, 2u}) resident.use_once(u);
      resident.residency.release_all();
      EXPECT_EQ(resident.gathered(), 0);
      resident.units.change_shards(0.5f);
      for (const std::size_t u : {0u, 1u, 2u}) {
        resident.use(u);
        // Every element changed once, in the part of the rank that owns it.
        resident.expect_values(u, 0.5f);
        resident.unpin(u);
      }
    });
  }
}

TEST(Residency, HoldGathersOutsideTheScheduleAndDropReleases) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(4, 1));
    resident.residency.hold(resident.units.unit(2));
    resident.expect_values(2);
    resident.residency.drop(resident.units.unit(2));
    EXPECT_EQ(resident.units.unit(2).state(), Unit::State::kGathered) << "it is pinned";
    resident.unpin(2);
    resident.residency.drop(resident.units.unit(2));
    EXPECT_EQ(resident.units.unit(2).state(), Unit::State::kReleased);
    EXPECT_EQ(resident.gathered(), 0) << "nothing is gathered ahead";
  });
}

TEST(Residency, ReadingAReleasedUnitThrows) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(3, 0));
    EXPECT_THROW(resident.units.parameter(1, 0).const_data_ptr<float>(), c10::Error);
    resident.use_once(1);
    resident.use_once(2);  // unit 2 takes the slot of unit 1
    EXPECT_THROW(resident.units.parameter(1, 0).const_data_ptr<float>(), c10::Error);
  });
}

TEST(Residency, FailedGatherPoisonsTheUnitAndReportsWhy) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Resident resident(mesh, options_of(3, 0));
    resident.units.axes().gather->abort(make_error(ExitCode::kUnavailable, "the cable is out"));
    resident.residency.use_or_poison(resident.units.unit(1));
    ASSERT_TRUE(resident.failure);
    EXPECT_NE(resident.failure->find("the cable is out"), std::string::npos) << *resident.failure;
    EXPECT_THROW(resident.units.parameter(1, 0).detach().add(1.0), c10::Error);
  });
}

}  // namespace
}  // namespace tessera::testing
