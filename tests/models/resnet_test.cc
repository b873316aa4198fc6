// Tests the ResNet model.

#include "workshop/models/resnet.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/models/model_tests.h"

namespace tessera::models {
namespace {

TEST(ResNet, DefaultIsResNet18) {
  const ResNet model;
  EXPECT_EQ(count_parameters(*model), 11173962);
}

TEST(ResNet, ConfigsHaveTheParametersOfTorchvisionsModels) {
  EXPECT_EQ(count_parameters(*ResNet(resnet18(/*side=*/224, /*channels=*/3, /*classes=*/1000))), 11689512);
  EXPECT_EQ(count_parameters(*ResNet(resnet50(/*side=*/224, /*channels=*/3, /*classes=*/1000))), 25557032);
  EXPECT_EQ(count_parameters(*ResNet(resnet18(/*side=*/32, /*channels=*/3, /*classes=*/10))), 11173962);
}

TEST(ResNet, WideStemHalvesTheImageTwice) {
  ResNet model(ResNetConfig{.classes = 5, .blocks = {1, 1}, .width = 8, .bottlenecks = true, .wide_stem = true});
  const at::Tensor images = at::randn({2, 3, 64, 64});
  EXPECT_EQ(model->forward(images).sizes(), (std::vector<std::int64_t>{2, 5}));
}

TEST(ResNet, HasTheRightShapesAndAllParametersLearn) {
  at::manual_seed(1);
  ResNet model(ResNetConfig{.classes = 7, .blocks = {1, 2}, .width = 8});
  const at::Tensor images = at::randn({4, 3, 16, 16});
  EXPECT_EQ(model->forward(images).sizes(), (std::vector<std::int64_t>{4, 7}));
  const at::Tensor loss = model->forward(images, at::arange(4));
  EXPECT_NEAR(loss.item<float>(), std::log(7.0f), 1.0f);
  loss.backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<float>(), 0.0f) << item.key();
  }
}

TEST(ResNet, OutputDependsOnTheBatchInTrainingOnly) {
  at::manual_seed(2);
  ResNet model(ResNetConfig{.blocks = {1, 1}, .width = 8});
  const at::Tensor images = at::randn({4, 3, 8, 8});
  model->forward(images);
  EXPECT_FALSE(model->forward(images).narrow(0, 0, 1).equal(model->forward(images.narrow(0, 0, 1))));
  model->eval();
  const at::Tensor alone = model->forward(images.narrow(0, 0, 1));
  EXPECT_LT((model->forward(images).narrow(0, 0, 1) - alone).abs().max().item<float>(), 1e-4f);
}

TEST(ResNet, LearnsABatch) {
  at::manual_seed(3);
  ResNet model(ResNetConfig{.classes = 4, .blocks = {1, 1}, .width = 8});
  const at::Tensor images = at::randn({8, 3, 8, 8}), labels = at::arange(8).remainder(4);
  const float before = model->forward(images, labels).item<float>();
  for (int step = 0; step < 100; ++step) {
    model->zero_grad();
    model->forward(images, labels).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.05);
  }
  EXPECT_LT(model->forward(images, labels).item<float>(), 0.5f * before);
}

}  // namespace
}  // namespace tessera::models
