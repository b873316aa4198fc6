// Tests the fit of link costs to measured calls.

#include "runtime/comm/rounds/fit_links.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace tessera {
namespace {

/// Returns calls of all algorithms. Their times are those of `fit`, with a relative error of `off` whose sign
/// alternates.
std::vector<TimedWork> calls_by(const LinkFit& fit, int ranks, double off = 0) {
  std::vector<TimedWork> calls;
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{4096}, std::size_t{65536}, std::size_t{1} << 20}) {
    for (const Operation operation : {Operation::kAllGather, Operation::kReduceScatter, Operation::kAllReduce}) {
      for (const Algorithm algorithm :
           {Algorithm::kDirect, Algorithm::kRing, Algorithm::kDoubling, Algorithm::kHalving}) {
        if (!has_algorithm(operation, algorithm, bytes)) continue;
        const CallWork work = work_of(operation, algorithm, ranks, DType::kF32, bytes);
        calls.push_back({work, fit.seconds_of(work) * (1 + (calls.size() % 2 == 0 ? off : -off))});
      }
    }
  }
  return calls;
}

TEST(FitLinks, ExactTimesGiveTheExactCosts) {
  const LinkFit costs{.round_s = 40e-6, .message_s = 5e-6, .byte_s = 8e-10, .add_s = 2e-10};
  const LinkFit fit = fit_links(calls_by(costs, 8));
  EXPECT_NEAR(fit.round_s, costs.round_s, 1e-9);
  EXPECT_NEAR(fit.message_s, costs.message_s, 1e-9);
  EXPECT_NEAR(fit.byte_s, costs.byte_s, 1e-14);
  EXPECT_NEAR(fit.add_s, costs.add_s, 1e-14);
}

TEST(FitLinks, NoisyTimesGiveNearlyTheCosts) {
  const LinkFit costs{.round_s = 40e-6, .message_s = 5e-6, .byte_s = 8e-10, .add_s = 0};
  const LinkFit fit = fit_links(calls_by(costs, 8, 0.05));
  EXPECT_NEAR(fit.round_s, costs.round_s, 0.2 * costs.round_s);
  EXPECT_NEAR(fit.message_s, costs.message_s, 0.3 * costs.message_s);
  EXPECT_NEAR(fit.byte_s, costs.byte_s, 0.2 * costs.byte_s);
}

// Each round of two ranks is one message, so only the sum of both costs can be known.
TEST(FitLinks, TwoRanksGiveOnlyTheSumOfRoundAndMessageCosts) {
  const LinkFit costs{.round_s = 30e-6, .message_s = 10e-6, .byte_s = 1e-9, .add_s = 0};
  const LinkFit fit = fit_links(calls_by(costs, 2));
  EXPECT_NEAR(fit.round_s + fit.message_s, 40e-6, 1e-9);
  EXPECT_NEAR(fit.byte_s, costs.byte_s, 1e-13);
}

// The best line through these calls has a slope below 0.
TEST(FitLinks, FittedCostsAreNeverNegative) {
  const LinkFit fit = fit_links(std::vector<TimedWork>{{{1, 1, 10, 0}, 2e-3}, {{1, 1, 1000, 0}, 1e-3}});
  EXPECT_GT(fit.round_s + fit.message_s, 0);
  for (const double each : {fit.round_s, fit.message_s, fit.byte_s, fit.add_s}) EXPECT_GE(each, 0);
  EXPECT_EQ(fit.byte_s, 0);
}

TEST(FitLinks, CallsWithoutTimesAreRefused) {
  EXPECT_THROW(fit_links({}), std::invalid_argument);
  EXPECT_THROW(fit_links(std::vector<TimedWork>{{{1, 1, 8, 0}, 0}}), std::invalid_argument);
}

}  // namespace
}  // namespace tessera
