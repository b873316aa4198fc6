// Tests which rank updates which matrix, how matrices are divided into batches, and which elements are sent to their
// owner and back.

#include "sharding/layout/matrix_deal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sharding/layout/plan/memory_plan.h"
#include "tessera/strategy.h"

namespace tessera {
namespace {

using enum ShardingStrategy;

/// Returns the units of a transformer of width `d`: a root without matrices, and blocks.
std::vector<UnitShape> blocks_of(std::int64_t count, std::int64_t d, int parts) {
  const std::vector<MatrixShape> matrices = {{3 * d, d}, {d, d}, {4 * d, d}, {d, 4 * d}};
  std::vector<std::int64_t> numels;
  for (const MatrixShape& matrix : matrices) numels.push_back(matrix.rows * matrix.columns);
  const std::int64_t vector_numel = 2 * d;
  std::vector<UnitShape> units(1);
  for (std::int64_t i = 0; i < count; ++i) {
    UnitShape unit;
    unit.groups.push_back({DType::kF32, true, Layout::pack({&vector_numel, 1}, parts)});
    unit.groups.push_back({DType::kF32, true, Layout::pack(numels, parts), matrices});
    units.push_back(std::move(unit));
  }
  return units;
}

struct Case {
  ShardingStrategy strategy;
  bool over_world;
  MeshPosition mesh;
};
constexpr Case kCases[] = {{kNoShard, false, {1, 1}},    {kNoShard, false, {1, 3}},    {kShardOptimizer, false, {1, 2}},
                           {kFullShard, false, {1, 1}},  {kFullShard, false, {1, 5}},  {kFullShard, false, {1, 64}},
                           {kHybridShard, true, {2, 2}}, {kHybridShard, false, {2, 3}}};

/// Calls `test(deal, units, case)` for models and meshes of several sizes.
template <class Test>
void for_deals(const Test& test) {
  for (const Case& c : kCases) {
    for (const std::int64_t count : {1, 2, 12}) {
      for (const std::int64_t width : {8, 100}) {
        const Placement placement = placement_of(c.strategy, c.over_world);
        const auto units = blocks_of(count, width, parts_of(placement, c.mesh));
        SCOPED_TRACE(name_of(c.strategy) + " on " + std::to_string(c.mesh.world_size()) + " ranks, " +
                     std::to_string(count) + " blocks of width " + std::to_string(width));
        test(MatrixDeal(units, placement.optimizer, c.mesh), units, c.mesh.world_size());
      }
    }
  }
}

TEST(MatrixDeal, BatchesHoldAllMatricesOfTheirUnitsInOrder) {
  for_deals([](const MatrixDeal& deal, const std::vector<UnitShape>& units, int) {
    ASSERT_EQ(deal.matrices().size(), 4 * (units.size() - 1));
    std::size_t next = 0, next_unit = 0;
    for (const MatrixBatch& batch : deal.batches()) {
      EXPECT_EQ(batch.begin, next);
      EXPECT_EQ(batch.begin_unit, next_unit);
      for (const DealtMatrix& matrix : deal.matrices_of(batch)) {
        EXPECT_GE(matrix.unit, batch.begin_unit);
        EXPECT_LT(matrix.unit, batch.end_unit);
        EXPECT_EQ(matrix.extent, units[matrix.unit].groups[matrix.group].layout.extent(matrix.tensor));
      }
      next = batch.end;
      next_unit = batch.end_unit;
    }
    EXPECT_EQ(next, deal.matrices().size());
  });
}

TEST(MatrixDeal, OwnersCollectEachElementOnceAndReturnEveryPart) {
  for_deals([](const MatrixDeal& deal, const std::vector<UnitShape>&, int ranks) {
    for (const DealtMatrix& matrix : deal.matrices()) {
      std::vector<int> collected(static_cast<std::size_t>(matrix.extent.numel)), returned = collected;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto count = [&](Extent piece, std::vector<int>& times) {
          for (std::int64_t i = 0; i < piece.numel; ++i)
            ++times[static_cast<std::size_t>(piece.offset - matrix.extent.offset + i)];
        };
        count(deal.collected_piece(matrix, rank), collected);
        count(deal.returned_piece(matrix, rank), returned);
      }
      EXPECT_EQ(std::ranges::count(collected, 1), matrix.extent.numel);
      EXPECT_EQ(std::ranges::count(returned, returned[0]), matrix.extent.numel);
      EXPECT_GT(returned[0], 0);
    }
  });
}

TEST(MatrixDeal, MessagesFitTheBatchsPlannedSizes) {
  for_deals([](const MatrixDeal& deal, const std::vector<UnitShape>&, int ranks) {
    for (const MatrixBatch& batch : deal.batches()) {
      for (int owner = 0; owner < ranks; ++owner) {
        for (int rank = 0; rank < ranks; ++rank) {
          std::int64_t to = 0, from = 0;
          for (const DealtMatrix& matrix : deal.matrices_of(batch)) {
            if (matrix.owner != owner || rank == owner) continue;
            to += deal.collected_piece(matrix, rank).numel;
            from += deal.returned_piece(matrix, rank).numel;
          }
          EXPECT_LE(to, batch.collected);
          EXPECT_LE(from, batch.returned);
        }
      }
      EXPECT_LE(ranks * std::max(batch.collected, batch.returned), deal.exchange_numel());
    }
  });
}

/// Gives each matrix one state with a number for each row, and one state with a number for each column.
void add_states(std::vector<UnitShape>& units, int parts) {
  for (UnitShape& unit : units) {
    for (GroupShape& group : unit.groups) {
      if (group.matrices.empty()) continue;
      std::vector<std::int64_t> numels;
      std::vector<std::size_t> first = {0};
      for (const MatrixShape& matrix : group.matrices) {
        numels.insert(numels.end(), {matrix.rows, matrix.columns});
        first.push_back(numels.size());
      }
      group.tensor_states = {Layout::pack(numels, parts), first};
    }
  }
}

TEST(MatrixDeal, StatesTravelWithTheirMatrices) {
  for (const Case& c : kCases) {
    const Placement placement = placement_of(c.strategy, c.over_world);
    const int parts = parts_of(placement, c.mesh), ranks = c.mesh.world_size();
    auto units = blocks_of(3, 100, parts);
    add_states(units, parts);
    const MatrixDeal deal(units, placement.optimizer, c.mesh, {.is_muon = false, .multiplies = false});
    SCOPED_TRACE(name_of(c.strategy) + " on " + std::to_string(ranks) + " ranks");
    for (const DealtMatrix& matrix : deal.matrices()) {
      ASSERT_GE(matrix.states.numel, matrix.shape.rows + matrix.shape.columns);
      std::vector<int> collected(static_cast<std::size_t>(matrix.states.numel)), returned = collected;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto count = [&](Extent piece, std::vector<int>& times) {
          for (std::int64_t i = 0; i < piece.numel; ++i)
            ++times[static_cast<std::size_t>(piece.offset - matrix.states.offset + i)];
        };
        count(deal.collected_states(matrix, rank), collected);
        count(deal.returned_states(matrix, rank), returned);
      }
      EXPECT_EQ(std::ranges::count(collected, 1), matrix.states.numel);
      EXPECT_EQ(std::ranges::count(returned, returned[0]), matrix.states.numel);
    }
    for (const MatrixBatch& batch : deal.batches()) {
      for (int owner = 0; owner < ranks; ++owner) {
        for (int rank = 0; rank < ranks; ++rank) {
          std::int64_t to = 0;
          for (const DealtMatrix& matrix : deal.matrices_of(batch)) {
            if (matrix.owner != owner || rank == owner) continue;
            to += 2 * deal.collected_piece(matrix, rank).numel + deal.collected_states(matrix, rank).numel;
          }
          EXPECT_LE(to, batch.collected);
        }
      }
    }
    PlanInput input;
    input.placement = placement;
    input.placement.mesh = c.mesh;
    input.units = blocks_of(3, 100, parts);
    const std::int64_t without = MemoryPlan(input).use()[MemoryCategory::kOptimizer];
    input.units = units;
    const TensorStates& states = units[1].groups[1].tensor_states;
    EXPECT_EQ(MemoryPlan(input).use()[MemoryCategory::kOptimizer] - without,
              3 * 4 * owned(placement.optimizer, c.mesh, states.numel()).numel);
  }
}

// If state is replicated, an owner has its own copy, so it collects nothing.
TEST(MatrixDeal, OwnerWithItsOwnCopyCollectsNothing) {
  const MatrixDeal replicated(blocks_of(3, 100, 1), placement_of(ShardingStrategy::kNoShard, false).optimizer, {1, 4});
  for (const MatrixBatch& batch : replicated.batches()) {
    EXPECT_EQ(batch.collected, 0);
    EXPECT_GT(batch.returned, 0);
  }
  const MatrixDeal alone(blocks_of(3, 100, 1), placement_of(kFullShard, false).optimizer, {1, 1});
  EXPECT_EQ(alone.exchange_numel(), 0);
}

/// Adds up the computing time of each batch's slowest rank. Returns that sum divided by the mean time of all ranks.
double unevenness(const MatrixDeal& deal, int ranks) {
  double longest = 0, all = 0;
  for (const MatrixBatch& batch : deal.batches()) {
    std::vector<double> loads(static_cast<std::size_t>(ranks));
    for (const DealtMatrix& matrix : deal.matrices_of(batch)) {
      loads[static_cast<std::size_t>(matrix.owner)] += static_cast<double>(MatrixDeal::cost_of(matrix.shape));
    }
    longest += *std::ranges::max_element(loads);
    all += std::accumulate(loads.begin(), loads.end(), 0.0);
  }
  return longest * ranks / all;
}

TEST(MatrixDeal, RanksComputeAboutTheSameAmount) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const Placement placement = placement_of(kFullShard, false);
    const MatrixDeal deal(blocks_of(48, 64, ranks), placement.optimizer, {1, ranks});
    EXPECT_LE(unevenness(deal, ranks), MatrixDeal::kMostUneven) << ranks;
    EXPECT_GT(deal.batches().size(), 1U) << ranks;
  }
}

TEST(MatrixDeal, BatchesAreAsSmallAsEvenSharingAllows) {
  const Placement placement = placement_of(kFullShard, false);
  // One rank makes one batch of each unit. Two ranks can share two blocks evenly, but not one block, so each batch has
  // two blocks.
  EXPECT_EQ(MatrixDeal(blocks_of(12, 64, 1), placement.optimizer, {1, 1}).batches().size(), 12U);
  EXPECT_EQ(MatrixDeal(blocks_of(12, 64, 2), placement.optimizer, {1, 2}).batches().size(), 6U);
}

TEST(MatrixDeal, BatchByUnitHoldsTheMatricesOfOneUnit) {
  for (const int ranks : {1, 2, 4}) {
    const Placement placement = placement_of(kFullShard, false);
    const MatrixDeal deal(blocks_of(12, 64, ranks), placement.optimizer, {1, ranks}, {}, /*by_unit=*/true);
    ASSERT_EQ(deal.batches().size(), 12U) << ranks;
    EXPECT_EQ(deal.batch_of(0), nullptr) << "the root has none";
    EXPECT_EQ(deal.batch_of(13), nullptr);
    for (std::size_t unit = 1; unit <= 12; ++unit) {
      const MatrixBatch* const batch = deal.batch_of(unit);
      ASSERT_EQ(batch, &deal.batches()[unit - 1]) << ranks;
      for (const DealtMatrix& matrix : deal.matrices_of(*batch)) EXPECT_EQ(matrix.unit, unit);
      EXPECT_EQ(deal.matrices_of(*batch).size(), 4U);
    }
  }
}

TEST(MatrixDeal, ExchangeBuffersAndStatesAreInTheMemoryPlan) {
  PlanInput input;
  input.units = blocks_of(4, 64, 2);
  input.placement = placement_of(kFullShard, false);
  input.placement.mesh = {1, 2};
  const MemoryPlan without(input);
  input.update.matrix_states = {StateDType::kF32};
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.matrix_bytes(),
            (2 * plan.passes().matrices.exchange_numel() + plan.passes().matrices.work_numel()) * 4);
  EXPECT_GT(plan.use()[MemoryCategory::kStaging], plan.matrix_bytes() - 1);
  const std::int64_t numel = input.units[1].groups[1].layout.numel();
  EXPECT_EQ(plan.use()[MemoryCategory::kOptimizer] - without.use()[MemoryCategory::kOptimizer], 4 * numel / 2 * 4);
}

// So many ranks cannot share few units evenly, so all units are one batch. No more records are read in advance than the
// disks' queue can take.
TEST(MatrixDeal, LargeBatchOfStatesIsReadAheadUpToTheDisksDepth) {
  PlanInput input;
  input.units = blocks_of(80, 64, 256);
  add_states(input.units, 256);
  input.placement = placement_of(kFullShard, false);
  input.placement.mesh = {1, 256};
  input.update.matrix_work = {.is_muon = false, .multiplies = false};
  input.tiers.moments = {Tier::kNvme, 0.9};
  input.update.states = {};  // elements have no states
  const MemoryPlan plan(input);
  ASSERT_EQ(plan.passes().matrices.batches().size(), 1U);
  EXPECT_EQ(plan.records().tensor_states_in_memory, 8);
  EXPECT_EQ(plan.records().tensor_states_of_a_batch, 72);
  EXPECT_EQ(plan.records().tensor_states_ahead(), kMostQueueDepth);
  EXPECT_EQ(plan.records().tensor_states.records, 72);
  EXPECT_EQ(plan.records().tensor_states.held, 72);
  EXPECT_EQ(plan.records().tensor_states.slots, 72);
  EXPECT_EQ(plan.records().disk.read_in_two_steps, 0) << "all have slots";
}

TEST(MatrixDeal, UnitsWithoutMatricesMakeNoBatch) {
  const MatrixDeal deal(std::vector<UnitShape>(3), {}, {1, 4});
  EXPECT_TRUE(deal.batches().empty());
  EXPECT_EQ(deal.exchange_numel() + deal.work_numel(), 0);
}

}  // namespace
}  // namespace tessera
