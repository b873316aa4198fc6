#include "optim/sgd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

// torch.optim.SGD(lr=0.1, ..., foreach=False) of PyTorch 2.11 on the problem of five_steps.
TEST(Sgd, FollowsPyTorchWithoutMomentum) {
  const OptimizerConfig config{.type = OptimizerType::kSgd, .weight_decay = 0.1};
  const std::vector<float> torch = {0.32748004794120789f, -1.0797321796417236f, 2.7863719463348389f,
                                    0.00080297508975490928f, 0.18068742752075195f};
  EXPECT_THAT(five_steps(*make_optimizer(config), 0.1f), Pointwise(FloatNear(1e-6f), torch));
}

TEST(Sgd, FollowsPyTorchWithMomentumAndDampening) {
  const OptimizerConfig config{.type = OptimizerType::kSgd, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.5};
  const std::vector<float> torch = {0.28019925951957703f, -1.0426191091537476f, 2.5757019519805908f,
                                    0.00073770078597590327f, 0.75624150037765503f};
  EXPECT_THAT(five_steps(*make_optimizer(config), 0.1f), Pointwise(FloatNear(1e-6f), torch));
}

TEST(Sgd, FollowsPyTorchWithNesterov) {
  const OptimizerConfig config{.type = OptimizerType::kSgd, .weight_decay = 0.0, .momentum = 0.9, .nesterov = true};
  const std::vector<float> torch = {0.064672127366065979f, -0.96424609422683716f, 2.7318909168243408f,
                                    0.00056467211106792092f, 1.1267983913421631f};
  EXPECT_THAT(five_steps(*make_optimizer(config), 0.1f), Pointwise(FloatNear(1e-6f), torch));
}

TEST(Sgd, FirstStepTakesTheGradientAsItsBuffer) {
  const OptimizerConfig config{.type = OptimizerType::kSgd, .weight_decay = 0.0, .momentum = 0.9, .dampening = 0.5};
  const auto optimizer = make_optimizer(config);
  std::vector<float> p = {1.0f}, g = {2.0f}, buffer = {77.0f};  // whatever lay there must not matter
  optimizer->step({.lr = 0.5f, .step = 1}, {.gradient = g, .master = p, .state0 = f32_state(buffer)});
  EXPECT_EQ(buffer[0], 2.0f);
  EXPECT_EQ(p[0], 0.0f);
  optimizer->step({.lr = 0.5f, .step = 2}, {.gradient = g, .master = p, .state0 = f32_state(buffer)});
  EXPECT_FLOAT_EQ(buffer[0], 2.0f * 0.9f + 0.5f * 2.0f);
}

TEST(Sgd, KeepsABufferOnlyWithMomentum) {
  EXPECT_EQ(make_optimizer({.type = OptimizerType::kSgd})->num_states(), 0);
  const auto with_momentum = make_optimizer({.type = OptimizerType::kSgd, .momentum = 0.9});
  EXPECT_EQ(with_momentum->num_states(), 1);
  EXPECT_EQ(with_momentum->state_name(0), "momentum_buffer");
}

}  // namespace
}  // namespace tessera
