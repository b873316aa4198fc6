// Tests that the division of a module into units decides what is gathered and reduced together, but changes no numbers.
// Norm, losses under clipping, and parameters are the same bit for bit.

#include <gtest/gtest.h>

#include <array>
#include <iterator>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace units_test {

struct Cut {
  std::string name;
  Adjust adjust;
  bool only_replicated = false;
};

const std::vector<Cut>& all_cuts() {
  const auto modules = [](Strategy& s) { s.units.classes.clear(); };
  const auto buckets = [](double cap_mb) {
    return [cap_mb](Strategy& s) {
      s.units.classes.clear();
      s.units.bucket_cap_mb = cap_mb;
      s.units.first_bucket_mb = 1.0 / 1024;
    };
  };
  static const std::vector<Cut> cuts = {
      {"blocks", [](Strategy&) {}},
      {"the whole module", modules},
      {"linear layers and norms",
       [](Strategy& s) {
         s.units.classes = {"Linear", "LayerNorm"};
       }},
      {"one block by name", [=](Strategy& s) { modules(s), s.units.modules = {"blocks.1"}; }},
      {"small modules", [=](Strategy& s) { modules(s), s.units.min_numel = 1; }},
      {"modules of 1000 elements", [=](Strategy& s) { modules(s), s.units.min_numel = 1000; }},
      {"blocks, gathered far ahead", [](Strategy& s) { s.prefetch = 5; }},
      {"a bucket a parameter", buckets(0), true},
      {"buckets of 4 KiB", buckets(4.0 / 1024), true},
      {"one bucket", buckets(25), true}};
  return cuts;
}

struct Case {
  DType dtype = DType::kF32;
  std::int64_t accumulation = 1;
};

/// Returns a model with small tensors, which share a block of 256, and with large tensors, which are cut into shards.
TinyOptions model_of(std::int64_t width, std::int64_t hidden) {
  TinyOptions model;
  model.width = width;
  model.hidden = hidden;
  return model;
}

/// Compares every division into units with the first division (NO_SHARD with blocks) on the same number of ranks.
void expect_the_same_however_cut(const Case& c, std::span<const int> all_ranks, std::span<const TinyOptions> models,
                                 const std::vector<Placed>& placements) {
  const auto exists = [](int, const TinyOptions&, const Placed& placed, const Cut& cut) {
    return !cut.only_replicated || placed.kind == ShardingStrategy::kNoShard;
  };
  MadeOnce<Trained> firsts;
  for (const auto& each : pairwise_where(exists, all_ranks, models, placements, all_cuts())) {
    const int ranks = std::get<0>(each);
    const TinyOptions& model = std::get<1>(each);
    const TrainOptions options{.model = model, .steps = 4, .batch = 12 * c.accumulation};
    const auto train = [&](const Placed& placed, const Cut& cut) {
      Strategy strategy = strategy_for(placed, nullptr, c.dtype);
      strategy.gradient_accumulation = c.accumulation;
      strategy.gradient_clipping = 0.25;
      cut.adjust(strategy);
      return train_on_threads({.ranks = ranks}, strategy, options);
    };
    const Placed& placed = std::get<2>(each);
    const Cut& cut = std::get<3>(each);
    const std::string where = " on " + std::to_string(ranks) + " ranks, width " + std::to_string(model.width);
    const std::string what = name_of(placed) + where + ", units: " + cut.name;
    const Trained& first = firsts(where, [&] { return train(ShardingStrategy::kNoShard, all_cuts().front()); });
    const Trained trained = train(placed, cut);
    for (const StepResult& step : trained.steps) {
      EXPECT_GT(step.grad_norm, 0.25) << what << ": nothing is clipped";
    }
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what;
    expect_same_bits(trained, first, what);
    if (::testing::Test::HasFailure()) return;
  }
}

const std::vector<Placed> kPlacements(std::begin(kOnePerPlacement), std::end(kOnePerPlacement));

TEST(Units, CutsChangeNoBitsOnAnyNumberOfRanks) {
  constexpr int kRanks[] = {1, 2, 3, 4};
  const TinyOptions models[] = {{}, model_of(48, 100)};
  expect_the_same_however_cut({}, kRanks, models, kPlacements);
}

TEST(Units, CutsChangeNoBitsInOtherDtypesOrWithMicrobatches) {
  const std::vector<Placed> two = {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard};
  const TinyOptions model;
  expect_the_same_however_cut({.dtype = DType::kBF16}, std::array{2}, {&model, 1}, two);
  expect_the_same_however_cut({.dtype = DType::kF16, .accumulation = 2}, std::array{3}, {&model, 1}, two);
}

TEST(Units, CutsChangeNoBitsOfFrozenUnusedOrTiedParameters) {
  TinyOptions model = model_of(20, 31);
  model.frozen_first_block = model.unused_block = model.tied_head = true;
  expect_the_same_however_cut({}, std::array{2}, {&model, 1}, kPlacements);
}

}  // namespace units_test
}  // namespace tessera::testing
