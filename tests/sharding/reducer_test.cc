// Tests how gradients are reduced over ranks and microbatches: the sums, the order of units, and parameters that some
// ranks do not use.

#include "sharding/reduce/reducer.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "reduced_units.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

struct Case {
  ShardingStrategy strategy;
  int ranks, replicate = 1;
  std::int64_t accumulation = 1;
  GradientSync sync = GradientSync::kEachMicrobatch;
  DType reduce = DType::kF32;
};

std::vector<Case> all_cases() {
  using enum ShardingStrategy;
  std::vector<Case> cases;
  for (const ShardingStrategy strategy : {kNoShard, kShardGradients, kFullShard}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const std::int64_t accumulation : {1, 3}) {
        cases.push_back({.strategy = strategy, .ranks = ranks, .accumulation = accumulation});
        cases.push_back({.strategy = strategy, .ranks = ranks, .accumulation = accumulation, .reduce = DType::kBF16});
        cases.push_back({.strategy = strategy,
                         .ranks = ranks,
                         .accumulation = accumulation,
                         .sync = GradientSync::kLastMicrobatch});
      }
    }
  }
  cases.push_back({.strategy = kHybridShard, .ranks = 4, .replicate = 2});
  cases.push_back({.strategy = kHybridShard, .ranks = 4, .replicate = 2, .accumulation = 2});
  return cases;
}

HandMadeUnits::Options options_of(const Case& c) {
  HandMadeUnits::Options options = some_units(6, c.strategy);
  options.replicate = c.replicate;
  options.accumulation = c.accumulation;
  options.sync = c.sync;
  options.reduce = c.reduce;
  return options;
}

std::string text_of(const Case& c) {
  return name_of(c.strategy) + ", " + std::to_string(c.ranks) + " ranks, " + std::to_string(c.accumulation) +
         " microbatches, " + std::string(name_of(c.reduce)) +
         (c.sync == GradientSync::kLastMicrobatch ? ", reduced once" : "");
}

TEST(Reducer, GradientIsTheSumOverRanksAndMicrobatches) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(text_of(c));
    run_ranks({.ranks = c.ranks}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(c));
      std::mt19937 order(7);
      for (int step = 0; step < 3; ++step) {
        for (std::int64_t k = 0; k < c.accumulation; ++k) {
          reduced.round(k, step == 2 ? &order : nullptr);
          const bool is_last = k + 1 == c.accumulation;
          reduced.reducer.finish(is_last || c.sync == GradientSync::kEachMicrobatch);
        }
        reduced.expect_sums_of_rounds(c.accumulation);
        reduced.reducer.reset();
      }
    });
  }
}

TEST(Reducer, VisitorSeesEachPartInItsFinalState) {
  for (const Case& c : all_cases()) {
    if (c.ranks == 1) continue;  // a single rank reduces nothing
    SCOPED_TRACE(text_of(c));
    run_ranks({.ranks = c.ranks}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(c));
      for (std::int64_t k = 0; k < c.accumulation; ++k) {
        reduced.round(k);
        reduced.reducer.finish(k + 1 == c.accumulation || c.sync == GradientSync::kEachMicrobatch);
      }
      for (std::size_t u = 0; u < reduced.units.size(); ++u) {
        const FlatGroup& group = reduced.units.group(u);
        const std::vector<float>& seen = reduced.recorder.seen_of(group);
        EXPECT_EQ(seen, std::vector<float>(group.gradient, group.gradient + group.gradient_part.numel)) << u;
      }
    });
  }
}

TEST(Reducer, UnusedUnitTakesPartWithZeros) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, some_units(5, strategy));
      // Rank r uses neither unit r + 1 nor the bias of unit 4.
      const auto uses = [](int rank, std::size_t u, std::size_t i) {
        return static_cast<int>(u) != rank + 1 && !(u == 4 && i == 1);
      };
      for (int step = 0; step < 3; ++step) {
        for (std::size_t u = 5; u-- > 0;) {
          for (const std::size_t i : {1u, 0u}) {
            if (uses(mesh.rank(), u, i)) reduced.take(u, i);
          }
        }
        reduced.reducer.finish(true);
        reduced.expect_sums([&](int rank, std::size_t u, std::size_t i) {
          const auto& sizes = reduced.units.group(u).parameters[i].sizes;
          return uses(rank, u, i) ? gradient_of(rank, 0, u, i, sizes) : at::zeros(sizes);
        });
        for (std::size_t u = 0; u < 5; ++u) {
          for (const std::size_t i : {0u, 1u}) {
            EXPECT_EQ(reduced.reducer.used(reduced.units.group(u), i), uses(mesh.rank(), u, i)) << u << " " << i;
          }
        }
        reduced.reducer.reset();
      }
    });
  }
}

TEST(Reducer, LateGradientIsAddedToTheSum) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, some_units(5, strategy));
      reduced.round(0);
      reduced.take(3, 0, /*round=*/1);  // this gradient's unit has been reduced already
      reduced.reducer.finish(true);
      reduced.expect_sums([&](int rank, std::size_t u, std::size_t i) {
        const auto& sizes = reduced.units.group(u).parameters[i].sizes;
        const at::Tensor once = gradient_of(rank, 0, u, i, sizes);
        return u == 3 && i == 0 ? once + gradient_of(rank, 1, u, i, sizes) : once;
      });
    });
  }
}

TEST(Reducer, EachUnitCountsOneReductionAndItsBytes) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    for (const DType reduce : {DType::kF32, DType::kBF16}) {
      Reduced reduced(mesh, options_of({.strategy = ShardingStrategy::kFullShard, .ranks = 2, .reduce = reduce}));
      std::int64_t numel = 0;
      for (std::size_t u = 0; u < reduced.units.size(); ++u) numel += reduced.units.group(u).layout.numel();
      for (int step = 1; step <= 3; ++step) {
        reduced.round(0);
        reduced.reducer.finish(true);
        reduced.reducer.reset();
        const ReducerCounts& counts = reduced.reducer.counts();
        EXPECT_EQ(counts.reductions, step * 6);
        EXPECT_EQ(counts.reduced_bytes, step * numel * static_cast<std::int64_t>(size_of(reduce)));
        EXPECT_EQ(counts.overflow_buckets, 0) << "in the order of definition the plan's are enough";
        EXPECT_EQ(counts.overflow_bytes, 0);
      }
    }
  });
}

// Gradients arrive in another order than the order that the first round assumes. The order of rank 0 becomes the order
// of all ranks.
TEST(Reducer, FirstRoundsOrderIsUsedInTheNext) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Reduced reduced(mesh, some_units(12));
    std::int64_t overflows = 0;
    for (int step = 0; step < 4; ++step) {
      for (std::size_t u = 0; u < 12; ++u) {
        for (const std::size_t i : {0u, 1u}) reduced.take(u, i);
      }
      reduced.reducer.finish(true);
      reduced.expect_sums_of_rounds(1);
      reduced.reducer.reset();
      const std::int64_t now = reduced.reducer.counts().overflow_buckets;
      if (step == 0) {
        EXPECT_GT(now, 0) << "all wait for the last";
      } else {
        EXPECT_EQ(now, overflows) << "step " << step;
      }
      overflows = now;
      EXPECT_EQ(reduced.reducer.counts().overflow_bytes, 0);
    }
  });
}

// ---- used sets ---------------------------------------------------------------------------------------------------

/// Defines which parameters a rank uses in a step.
struct Uses {
  std::function<bool(int rank, std::size_t u, std::size_t i)> used;
  bool ascending = false;  ///< whether gradients arrive in the order of units, and not in the opposite order
};

/// Makes a step of one round. Returns the number of buckets that the step needed in addition to those of the plan.
std::int64_t step(Reduced& reduced, const Uses& uses) {
  const std::int64_t before = reduced.reducer.counts().overflow_buckets;
  for (std::size_t k = 0; k < reduced.units.size(); ++k) {
    const std::size_t u = uses.ascending ? k : reduced.units.size() - 1 - k;
    for (const std::size_t i : {1u, 0u}) {
      if (uses.used(reduced.mesh.rank(), u, i)) reduced.take(u, i);
    }
  }
  reduced.reducer.finish(true);
  reduced.expect_sums([&](int rank, std::size_t u, std::size_t i) {
    const auto& sizes = reduced.units.group(u).parameters[i].sizes;
    return uses.used(rank, u, i) ? gradient_of(rank, 0, u, i, sizes) : at::zeros(sizes);
  });
  EXPECT_EQ(reduced.reducer.counts().overflow_bytes, 0) << "they are given back";
  const std::int64_t overflows = reduced.reducer.counts().overflow_buckets - before;
  if (overflows > 0) {
    EXPECT_GT(reduced.reducer.counts().overflow_peak, 0);
  }
  reduced.reducer.reset();
  EXPECT_EQ(reduced.reducer.counts().overflow_peak, 0);
  // The agreement of the step tells for each parameter whether any rank used it.
  std::vector<char> used;
  for (std::size_t u = 0; u < reduced.units.size(); ++u) {
    for (const std::size_t i : {0u, 1u}) {
      char anywhere = 0;
      for (int rank = 0; rank < reduced.mesh.world_size(); ++rank) anywhere |= static_cast<char>(uses.used(rank, u, i));
      used.push_back(anywhere);
    }
  }
  reduced.reducer.expect(used);
  return overflows;
}

const Uses kAll{[](int, std::size_t, std::size_t) { return true; }};

/// Runs `body` on two ranks with more units than the plan has buckets. A unit whose gradients wait then holds a bucket
/// that another unit needs.
template <class Body>
void on_many_units(const Body& body) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Reduced reduced(mesh, some_units(12));
    ASSERT_LT(reduced.units.plan().sums().shared_buckets, 10);
    body(reduced);
  });
}

TEST(Reducer, UnusedUnitsHoldNoBucketOnceKnown) {
  // Unit 11 is the last unit, and the first in the order. The cases do not use unit 11, one of its parameters, the last
  // three units, or one parameter of each unit.
  const std::function<bool(int, std::size_t, std::size_t)> sets[] = {
      [](int, std::size_t u, std::size_t) { return u != 11; },
      [](int, std::size_t u, std::size_t i) { return u != 11 || i == 0; },
      [](int, std::size_t u, std::size_t) { return u < 9; },
      [](int, std::size_t u, std::size_t i) { return i != u % 2; }};
  for (const auto& used : sets) {
    on_many_units([&](Reduced& reduced) {
      EXPECT_EQ(step(reduced, kAll), 0);
      EXPECT_GT(step(reduced, {used}), 0) << "all wait for what does not come";
      for (int k = 0; k < 3; ++k) EXPECT_EQ(step(reduced, {used}), 0) << k;
    });
  }
}

TEST(Reducer, UnusedUnitIsReducedInEveryStep) {
  on_many_units([](Reduced& reduced) {
    const Uses uses{[](int, std::size_t u, std::size_t) { return u != 5; }};
    for (int k = 1; k <= 3; ++k) {
      step(reduced, uses);
      EXPECT_EQ(reduced.reducer.counts().reductions, 12 * k);
    }
  });
}

TEST(Reducer, ReturningUnitNeedsMoreBucketsUntilTheNextAgreement) {
  on_many_units([](Reduced& reduced) {
    const Uses without{[](int, std::size_t u, std::size_t) { return u != 11; }};
    step(reduced, without);
    EXPECT_EQ(step(reduced, without), 0);
    EXPECT_GT(step(reduced, kAll), 0) << "the last unit's bucket waits for its turn, which comes last";
    step(reduced, kAll);  // at the end of this step, the ranks agree on the order again
    for (int k = 0; k < 3; ++k) EXPECT_EQ(step(reduced, kAll), 0) << k;
  });
}

TEST(Reducer, OrderIsAgreedAgainOnlyWhenTheUsedSetChanges) {
  on_many_units([](Reduced& reduced) {
    Uses up = kAll;
    up.ascending = true;
    EXPECT_EQ(step(reduced, kAll), 0);
    for (int k = 0; k < 3; ++k) EXPECT_GT(step(reduced, up), 0) << "the order is that of the first step; " << k;
    const Uses up_without{[](int, std::size_t u, std::size_t) { return u != 6; }, /*ascending=*/true};
    EXPECT_GT(step(reduced, up_without), 0);
    EXPECT_GT(step(reduced, up_without), 0) << "in which the order is agreed again";
    for (int k = 0; k < 3; ++k) EXPECT_EQ(step(reduced, up_without), 0) << k;
  });
}

// A unit is reduced in its turn, since none of its gradients are expected. Then some of its gradients arrive after all,
// on one rank only.
TEST(Reducer, LateGradientIsReducedOnceMoreOnAllRanks) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    for (const int ranks : {2, 3}) {
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        Reduced reduced(mesh, some_units(8, strategy));
        const Uses without{[](int, std::size_t u, std::size_t) { return u != 7; }};
        // The last rank uses unit 7 after all, after all other units.
        const Uses once{[&](int rank, std::size_t u, std::size_t) { return u != 7 || rank + 1 == ranks; },
                        /*ascending=*/true};
        step(reduced, without);
        step(reduced, without);  // now this unit is the last in the order
        const std::int64_t before = reduced.reducer.counts().reductions;
        step(reduced, once);
        const std::int64_t reductions = reduced.reducer.counts().reductions - before;
        EXPECT_EQ(reductions, 9);
        step(reduced, without);
        step(reduced, without);
      });
    }
  }
}

// Each rank uses random parameters in a random order. The choice of parameters changes every second step.
TEST(Reducer, SumsAreExactForRandomUsesOnEachRank) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(text_of(c));
    run_ranks({.ranks = c.ranks}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(c));
      std::mt19937 draw(11), order(static_cast<unsigned>(5 + mesh.rank()));
      std::vector<char> uses(static_cast<std::size_t>(c.ranks) * 12);  // [rank, unit, parameter], the same on all ranks
      const auto flag = [](int rank, std::size_t u, std::size_t i) {
        return (static_cast<std::size_t>(rank) * 6 + u) * 2 + i;
      };
      for (int step = 0; step < 8; ++step) {
        if (step % 2 == 0) {  // each choice is used for two steps
          for (char& use : uses) use = draw() % 3 != 0;
        }
        std::vector<std::pair<std::size_t, std::size_t>> mine;
        for (std::size_t u = 6; u-- > 0;) {
          for (const std::size_t i : {1u, 0u}) {
            if (uses[flag(mesh.rank(), u, i)]) mine.emplace_back(u, i);
          }
        }
        for (std::int64_t k = 0; k < c.accumulation; ++k) {
          if (step % 4 >= 2) std::shuffle(mine.begin(), mine.end(), order);
          for (const auto& [u, i] : mine) reduced.take(u, i, k);
          reduced.reducer.finish(k + 1 == c.accumulation || c.sync == GradientSync::kEachMicrobatch);
        }
        std::vector<char> anywhere(12);
        reduced.expect_sums([&](int rank, std::size_t u, std::size_t i) {
          const auto& sizes = reduced.units.group(u).parameters[i].sizes;
          at::Tensor sum = at::zeros(sizes);
          if (!uses[flag(rank, u, i)]) return sum;
          anywhere[2 * u + i] = 1;
          for (std::int64_t k = 0; k < c.accumulation; ++k) sum += gradient_of(rank, k, u, i, sizes);
          return sum;
        });
        EXPECT_EQ(reduced.reducer.counts().overflow_bytes, 0);
        reduced.reducer.reset();
        reduced.reducer.expect(anywhere);
      }
    });
  }
}

// ---- sparse gradients --------------------------------------------------------------------------------------------

TEST(Reducer, RowsOfSparseGradientsAreSummed) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(text_of(c));
    run_ranks({.ranks = c.ranks}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(c));
      // The matrix of unit 3 gets a gradient of row 9, and two gradients of the row with the rank's number.
      const auto rows = [&](int rank, std::int64_t round) {
        const at::Tensor index = at::tensor({rank, 9, rank}, at::kLong).unsqueeze(0);
        const at::Tensor values = at::full({3, 33}, static_cast<float>(1 + rank + round));
        return at::sparse_coo_tensor(index, values, reduced.units.group(3).parameters[0].sizes);
      };
      for (int step = 0; step < 2; ++step) {
        for (std::int64_t k = 0; k < c.accumulation; ++k) {
          for (std::size_t u = 6; u-- > 0;) {
            reduced.take(u, 1, k);
            u == 3 ? reduced.take(u, 0, rows(mesh.rank(), k)) : reduced.take(u, 0, k);
          }
          reduced.reducer.finish(k + 1 == c.accumulation || c.sync == GradientSync::kEachMicrobatch);
        }
        reduced.expect_sums([&](int rank, std::size_t u, std::size_t i) {
          const auto& sizes = reduced.units.group(u).parameters[i].sizes;
          at::Tensor sum = at::zeros(sizes);
          for (std::int64_t k = 0; k < c.accumulation; ++k) {
            sum += u == 3 && i == 0 ? rows(rank, k).to_dense() : gradient_of(rank, k, u, i, sizes);
          }
          return sum;
        });
        reduced.reducer.reset();
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
