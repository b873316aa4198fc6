// Tests the loops of compressors that send momentum instead of gradients.

#include "runtime/comm/sum/momentum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tessera {
namespace {

std::vector<float> draws(std::size_t numel, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(generator);
  return values;
}

TEST(Momentum, EveryProductIsRoundedByItself) {
  for (const std::size_t numel : {1u, 7u, 64u, 1001u}) {
    const std::vector<float> moving = draws(numel, 1), values = draws(numel, 2), before = draws(numel, 3);
    std::vector<float> made = values, moved = moving, sum = before;
    make_momentum(0.9f, 0.1f, moving.data(), numel, made.data());
    add_momentum(0.9f, values.data(), numel, moved.data(), sum.data());
    for (std::size_t i = 0; i < numel; ++i) {
      const volatile float kept = 0.9f * moving[i], fresh = 0.1f * values[i];
      EXPECT_EQ(made[i], kept + fresh) << i;
      const volatile float both = kept + values[i];
      EXPECT_EQ(moved[i], both) << i;
      EXPECT_EQ(sum[i], before[i] + both) << i;
    }
  }
}

// Each rank makes its share of the momentum from its gradients. The sum of gradients is computed back from the sum of
// shares, and the momentum of that sum equals the sum of shares.
TEST(Momentum, SumComesBackAndSharesAddUpToItsMomentum) {
  constexpr int kRanks = 3;
  constexpr std::size_t kNumel = 133;
  std::vector<float> moving = draws(kNumel, 1), sum(kNumel, 0.0f), gradients = sum;
  const std::vector<float> before = moving;
  for (unsigned rank = 0; rank < kRanks; ++rank) {
    std::vector<float> values = draws(kNumel, 10 + rank);
    for (std::size_t i = 0; i < kNumel; ++i) gradients[i] += values[i];
    make_momentum(0.75f, 0.25f, moving.data(), kNumel, values.data());
    for (std::size_t i = 0; i < kNumel; ++i) sum[i] += values[i];
  }
  const std::vector<float> momentum = sum;
  unmake_momentum(0.75f, 0.25f, kRanks, kNumel, moving.data(), sum.data());
  for (std::size_t i = 0; i < kNumel; ++i) {
    EXPECT_NEAR(sum[i], gradients[i], 1e-5) << i;
    EXPECT_NEAR(moving[i] * kRanks, momentum[i], 1e-6) << i;
    EXPECT_NEAR(moving[i], 0.75f * before[i] + 0.25f * gradients[i] / kRanks, 1e-5) << i;
  }
}

}  // namespace
}  // namespace tessera
