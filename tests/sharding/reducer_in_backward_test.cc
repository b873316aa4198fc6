// Tests that the Reducer hands over sums unit by unit if units are updated in backward.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reduced_units.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

HandMadeUnits::Options options_of(ShardingStrategy strategy, int replicate = 1, DType reduce = DType::kF32) {
  HandMadeUnits::Options options = some_units(9, strategy);
  options.replicate = replicate;
  options.reduce = reduce;
  options.updates_in_backward = true;
  return options;
}

/// Records the units that the Reducer hands over, and checks that their gradients are the sums over ranks.
struct HandedOver {
  explicit HandedOver(Reduced& reduced) {
    reduced.reducer.on_summed([&](Unit& unit, const UnitAgreement& told) {
      const auto u = static_cast<std::size_t>(unit.index);
      units.push_back(unit.index);
      used.emplace_back(told.used.begin(), told.used.end());
      agreed = agreed && told.ranks_agree;
      EXPECT_TRUE(unit.is_closed());
      reduced.expect_sum(u, [&](int rank, std::size_t, std::size_t i) {
        const auto& sizes = reduced.units.group(u).parameters[i].sizes;
        return is_left_out(rank, u, i) ? at::zeros(sizes) : gradient_of(rank, 0, u, i, sizes);
      });
    });
  }
  std::function<bool(int rank, std::size_t u, std::size_t i)> is_left_out = [](int, std::size_t, std::size_t) {
    return false;
  };
  std::vector<int> units;
  std::vector<std::vector<char>> used;  ///< [unit], in the order of handing over: which parameters were used
  bool agreed = true;
};

void end_step(Reduced& reduced) {
  reduced.reducer.finish(true);
  reduced.reducer.reset();
  for (std::size_t u = 0; u < reduced.units.size(); ++u) {
    EXPECT_EQ(reduced.units.group(u).gradient, nullptr) << "its place is given back";
    reduced.units.unit(u).reopen();
  }
}

TEST(ReducerInBackward, EachSumIsHandedOverOnceInReductionOrder) {
  using enum ShardingStrategy;
  struct Case {
    ShardingStrategy strategy;
    int ranks, replicate;
    DType reduce;
  };
  std::vector<Case> cases = {{kHybridShard, 4, 2, DType::kF32}, {kNoShard, 4, 2, DType::kF32}};
  for (const ShardingStrategy strategy : {kNoShard, kShardGradients, kFullShard}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const DType reduce : {DType::kF32, DType::kBF16}) cases.push_back({strategy, ranks, 1, reduce});
    }
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(name_of(c.strategy) + ", " + std::to_string(c.ranks) + " ranks");
    run_ranks({.ranks = c.ranks}, [&](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(c.strategy, c.replicate, c.reduce));
      HandedOver handed(reduced);
      std::mt19937 order(7);
      for (int step = 0; step < 3; ++step) {
        handed.units.clear();
        const std::vector<int> expected(reduced.reducer.order().begin(), reduced.reducer.order().end());
        reduced.round(0, step == 2 ? &order : nullptr);
        end_step(reduced);
        EXPECT_EQ(handed.units, expected);
        if (step == 2) break;
        EXPECT_EQ(reduced.reducer.counts().overflow_buckets, 0) << "the plan has room";
      }
      EXPECT_EQ(reduced.reducer.counts().overflow_bytes, 0) << "what was beyond the plan is given back";
      for (const std::vector<char>& used : handed.used) EXPECT_EQ(used, (std::vector<char>{1, 1}));
      EXPECT_TRUE(handed.agreed);
    });
  }
}

TEST(ReducerInBackward, HandedUsesAreThoseOfAnyRank) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    Reduced reduced(mesh, options_of(ShardingStrategy::kNoShard));
    HandedOver handed(reduced);
    // Unit 4 has no second parameter, and rank r does not use unit r + 1.
    handed.is_left_out = [](int rank, std::size_t u, std::size_t i) {
      return static_cast<int>(u) == rank + 1 || (u == 4 && i == 1);
    };
    for (std::size_t u = reduced.units.size(); u-- > 0;) {
      for (const std::size_t i : {1u, 0u}) {
        if (!handed.is_left_out(mesh.rank(), u, i)) reduced.take(u, i);
      }
    }
    end_step(reduced);
    ASSERT_EQ(handed.units.size(), 9u);
    for (std::size_t k = 0; k < 9; ++k) {
      const bool is_fourth = handed.units[k] == 4;
      EXPECT_EQ(handed.used[k], (is_fourth ? std::vector<char>{1, 0} : std::vector<char>{1, 1})) << handed.units[k];
    }
  });
}

TEST(ReducerInBackward, DifferentGatherOrdersAreNoticed) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      for (const bool differs : {false, true}) {
        Reduced reduced(mesh, options_of(ShardingStrategy::kFullShard));
        HandedOver handed(reduced);
        reduced.reducer.begin_round(differs && mesh.rank() == 1 ? 0xFFFE : 0xFFFF, 1.0, 3);
        reduced.round(0);
        end_step(reduced);
        EXPECT_EQ(handed.agreed, !differs || ranks == 1);
      }
    });
  }
}

TEST(ReducerInBackward, LateGradientIsRefusedByName) {
  for (const int ranks : {1, 2}) {
    run_ranks({.ranks = ranks}, [](const Mesh& mesh) {
      Reduced reduced(mesh, options_of(ShardingStrategy::kFullShard));
      HandedOver handed(reduced);
      reduced.round(0);
      try {
        reduced.take(3, 0);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.exit_code(), ExitCode::kUsage);
        EXPECT_THAT(error.message(), AllOf(HasSubstr(reduced.units.group(3).parameters[0].name), HasSubstr("hint")));
      }
      end_step(reduced);
    });
  }
}

TEST(ReducerInBackward, ReadingAUnitUnderUpdateSaysWhy) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Reduced reduced(mesh, options_of(ShardingStrategy::kFullShard));
    HandedOver handed(reduced);
    const auto read = [&] { return reduced.units.parameter(2, 0).detach().sum().item<double>(); };
    const double before = read();
    reduced.round(0);
    try {
      read();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("unit 2"), HasSubstr("being updated"), HasSubstr("engine.step()")));
    }
    end_step(reduced);
    EXPECT_EQ(read(), before);
  });
}

}  // namespace
}  // namespace tessera::testing
