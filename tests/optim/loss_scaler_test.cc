// Tests the rule of the loss scale, and compares it with PyTorch's GradScaler.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "optim/loss_scale.h"

namespace tessera {
namespace {

struct LossScaler {
  explicit LossScaler(const LossScaleConfig& config) : rule(loss_scale_rule(config)), state(first_loss_scale(config)) {}

  const LossScaleRule rule;
  LossScalerState state;
};

// Runs steps, 'x' with overflow and '.' with finite gradients, and returns the scale after each step.
std::vector<float> scales(LossScaler& scaler, const std::string& pattern) {
  std::vector<float> result;
  for (char step : pattern) {
    next_loss_scale(scaler.rule, scaler.state, step == 'x');
    result.push_back(scaler.state.scale);
  }
  return result;
}

LossScaleConfig config() { return {.initial = 1024.0, .growth_interval = 3, .minimum = 0.0}; }

// The expected scales are those of torch.amp.GradScaler(init_scale=1024, growth_interval=3) in PyTorch 2.11 for this
// pattern.
TEST(LossScaler, FollowsGradScaler) {
  LossScaler scaler(config());
  EXPECT_EQ(scales(scaler, "....x..xx.......x."),
            (std::vector<float>{1024, 1024, 2048, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512, 512, 1024, 1024,
                                512, 512}));
}

TEST(LossScaler, HysteresisToleratesOverflowsInARow) {
  LossScaleConfig tolerant = config();
  tolerant.hysteresis = 3;
  LossScaler scaler(tolerant);
  EXPECT_EQ(scales(scaler, "xx.xxxx.x"), (std::vector<float>{1024, 1024, 1024, 1024, 1024, 512, 256, 256, 256}));
}

TEST(LossScaler, NeverFallsBelowTheMinimum) {
  LossScaleConfig bounded = config();
  bounded.minimum = 300.0;
  LossScaler scaler(bounded);
  EXPECT_EQ(scales(scaler, "xxx"), (std::vector<float>{512, 300, 300}));
  bounded.minimum = 5000.0;
  LossScaler below(bounded);
  EXPECT_EQ(scales(below, "x"), (std::vector<float>{1024}));
}

TEST(LossScaler, NeverGrowsToInfinity) {
  LossScaleConfig huge = config();
  huge.initial = 2e38;
  huge.growth_interval = 1;
  LossScaler scaler(huge);
  EXPECT_EQ(scales(scaler, ".."), (std::vector<float>{2e38f, 2e38f}));
}

TEST(LossScaler, StaticScaleNeverMoves) {
  LossScaleConfig fixed = config();
  fixed.dynamic = false;
  LossScaler scaler(fixed);
  EXPECT_EQ(scales(scaler, "...xx..."), std::vector<float>(8, 1024.0f));
}

TEST(LossScaler, RestoredStateContinuesTheSameScales) {
  const std::string pattern = "..x.....xx....x...";
  LossScaleConfig tolerant = config();
  tolerant.hysteresis = 2;
  LossScaler whole(tolerant);
  const std::vector<float> wanted = scales(whole, pattern);
  for (std::size_t cut = 0; cut <= pattern.size(); ++cut) {
    LossScaler before(tolerant), after(tolerant);
    std::vector<float> got = scales(before, pattern.substr(0, cut));
    after.state = before.state;
    for (float scale : scales(after, pattern.substr(cut))) got.push_back(scale);
    EXPECT_EQ(got, wanted) << "cut at " << cut;
  }
}

}  // namespace
}  // namespace tessera
