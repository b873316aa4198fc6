// How a module is cut into units decides what is gathered and reduced together, and nothing about numbers: norm, clipped
// losses and parameters are the same bit for bit.

#include <gtest/gtest.h>

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

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
  int ranks = 1;
  std::int64_t accumulation = 1;
  TinyOptions model = {};
};

/// Small tensors that share a block of 256, and large ones that are cut by shards.
TinyOptions model_of(std::int64_t width, std::int64_t hidden) {
  TinyOptions model;
  model.width = width;
  model.hidden = hidden;
  return model;
}

void expect_the_same_however_cut(const Case& c, const std::vector<Placed>& placements) {
  const TrainOptions options{.model = c.model, .steps = 4, .batch = 12 * c.accumulation};
  std::optional<Trained> first;
  for (const Placed& placed : placements) {
    for (const Cut& cut : all_cuts()) {
      if (cut.only_replicated && placed.kind != ShardingStrategy::kNoShard) continue;
      const Strategy strategy = strategy_for(
          placed,
          [&](Strategy& s) {
            s.gradient_accumulation = c.accumulation;
            s.gradient_clipping = 0.25;
            cut.adjust(s);
          },
          c.dtype);
      const std::string what = name_of(placed) + " on " + std::to_string(c.ranks) + " ranks, units: " + cut.name;
      const Trained trained = train_on_threads({.ranks = c.ranks}, strategy, options);
      for (const StepResult& step : trained.steps) {
        EXPECT_GT(step.grad_norm, 0.25) << what << ": nothing is clipped";
      }
      EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what;
      if (!first) first = trained;
      expect_same_bits(trained, *first, what);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

const std::vector<Placed> kPlacements(std::begin(kOnePerPlacement), std::end(kOnePerPlacement));

TEST(Units, ChangeNoBitOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4}) {
    expect_the_same_however_cut({.ranks = ranks}, kPlacements);
    expect_the_same_however_cut({.ranks = ranks, .model = model_of(48, 100)}, kPlacements);
  }
}

TEST(Units, ChangeNoBitInOtherDtypesAndWithMicrobatches) {
  const std::vector<Placed> two = {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard};
  expect_the_same_however_cut({.dtype = DType::kBF16, .ranks = 2}, two);
  expect_the_same_however_cut({.dtype = DType::kF16, .ranks = 3, .accumulation = 2}, two);
}

TEST(Units, ChangeNoBitWhereParametersAreFrozenUnusedOrTied) {
  TinyOptions model = model_of(20, 31);
  model.frozen_first_block = model.unused_block = model.tied_head = true;
  expect_the_same_however_cut({.ranks = 2, .model = model}, kPlacements);
}

}  // namespace
}  // namespace tessera::testing
