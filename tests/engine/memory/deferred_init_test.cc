// Tests deferred initialization. Tensors that are made later have the values that they would have if they were made at
// once, and recording takes neither memory nor time.

#include "tessera/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>
#include <torch/utils.h>

#include <cstring>
#include <functional>

#include "engine/init/known_draws.h"

namespace tessera {
namespace deferred_init_test {

using torch::nn::Module;
using Factory = std::function<std::shared_ptr<Module>()>;

/// Compares bits, so that NaN equals NaN and -0 differs from 0.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type() || a.strides() != b.strides()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

void expect_equals_eager(const Factory& make) {
  torch::manual_seed(5);
  const auto eager = make();
  const at::Tensor eager_next = at::randn({4});

  torch::manual_seed(5);
  const auto deferred = deferred_init(make);
  const at::Tensor deferred_next = at::randn({4});
  EXPECT_TRUE(same_bits(eager_next, deferred_next)) << "the generator did not move as in eager construction";
  for (const auto& item : deferred->named_parameters()) {
    EXPECT_TRUE(is_deferred(item.value())) << item.key();
    EXPECT_TRUE(item.value().is_meta()) << item.key();
  }
  materialize_module(*deferred);
  const auto want = eager->named_parameters();
  const auto got = deferred->named_parameters();
  ASSERT_EQ(want.size(), got.size());
  for (const auto& item : want) {
    EXPECT_TRUE(same_bits(item.value(), got[item.key()])) << item.key();
    EXPECT_EQ(item.value().requires_grad(), got[item.key()].requires_grad());
    EXPECT_TRUE(got[item.key()].is_leaf());
  }
  for (const auto& item : eager->named_buffers()) {
    EXPECT_TRUE(same_bits(item.value(), deferred->named_buffers()[item.key()])) << item.key();
  }
}

struct OddInit : Module {
  OddInit() {
    scaled = register_parameter("scaled", at::randn({5, 3}) * 0.02);
    rows = register_parameter("rows", at::zeros({4, 4}));
    const at::NoGradGuard no_grad;
    rows[1].fill_(2.0);
    rows.narrow(1, 2, 2).normal_();
    orthogonal = register_parameter("orthogonal", torch::nn::init::orthogonal_(at::zeros({6, 4})));
    truncated = register_parameter("truncated", torch::nn::init::xavier_uniform_(at::zeros({7, 2})));
    torch::nn::init::normal_(scaled, 0, 1);  // this replaces the first draw, which still moves the generator
    mask = register_buffer("mask", at::zeros({3, 3}).fill_(1).tril());
    constant = register_buffer("constant", at::arange(5).to(at::kFloat).mul(2));
    value = scaled.sum().item<float>();
    // These operators take lists of tensors, and need tensors "on the same device".
    joined = register_buffer("joined", at::cat({at::ones({2}), rows[0], at::stack({constant, constant})[0]}));
    beside = register_parameter("beside", at::zeros({4}));
    beside.copy_(at::arange(4, at::TensorOptions(at::kFloat).device(beside.device())));
    beside.add_(at::zeros_like(beside, beside.options()).to(beside.device()));
  }
  at::Tensor scaled, rows, orthogonal, truncated, mask, constant, joined, beside;
  float value = 0;
};

/// One buffer is drawn, read, drawn again and read again, as rejection sampling does. Each reader must get the values
/// that the buffer had when it was read.
struct DrawsAgain : Module {
  DrawsAgain() {
    const torch::NoGradGuard no_grad;
    at::Tensor drawn = at::empty({5, 3});
    const at::Tensor first = at::zeros({5, 3}), second = at::zeros({5, 3});
    drawn.uniform_();
    first.copy_(drawn);
    drawn.normal_();
    second.copy_(drawn);
    drawn.zero_();
    weight = register_parameter("weight", first.sub(second).add(drawn));
  }
  at::Tensor weight;
};

TEST(DeferredInit, BufferDrawnAgainGivesEachReaderItsOwnValues) {
  expect_equals_eager([] { return std::make_shared<DrawsAgain>(); });
}

TEST(DeferredInit, StockModulesEqualEager) {
  using namespace torch::nn;
  expect_equals_eager([] { return Linear(17, 5).ptr(); });
  expect_equals_eager([] { return Embedding(EmbeddingOptions(11, 4).padding_idx(2)).ptr(); });
  expect_equals_eager([] { return LSTM(LSTMOptions(5, 7).num_layers(2).bidirectional(true)).ptr(); });
  expect_equals_eager([] { return GRU(3, 4).ptr(); });
  expect_equals_eager([] { return MultiheadAttention(8, 2).ptr(); });
  expect_equals_eager([] { return Conv2d(Conv2dOptions(3, 8, 3)).ptr(); });
  expect_equals_eager([] { return BatchNorm2d(6).ptr(); });
  expect_equals_eager([] { return GroupNorm(2, 6).ptr(); });
  expect_equals_eager([] { return Bilinear(3, 4, 5).ptr(); });
  expect_equals_eager([] { return PReLU().ptr(); });
  expect_equals_eager([] { return Transformer(TransformerOptions(8, 2, 1, 1).dim_feedforward(16)).ptr(); });
}

TEST(DeferredInit, ComposedInitialisationEqualsEager) {
  expect_equals_eager([]() -> std::shared_ptr<Module> {
    auto module = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    module->apply([](Module& m) {
      if (auto* linear = m.as<torch::nn::LinearImpl>()) torch::nn::init::normal_(linear->weight, 0, 0.02);
    });
    return module;
  });
}

TEST(DeferredInit, MaterialisingInAnyOrderEqualsEager) {
  torch::manual_seed(3);
  torch::nn::Linear first(6, 6), second(6, 6);
  torch::manual_seed(3);
  auto deferred = deferred_init([] { return std::pair{torch::nn::Linear(6, 6), torch::nn::Linear(6, 6)}; });
  materialize_module(*deferred.second);
  materialize_module(*deferred.first);
  EXPECT_TRUE(same_bits(first->weight, deferred.first->weight));
  EXPECT_TRUE(same_bits(second->weight, deferred.second->weight));
}

TEST(DeferredInit, DeferredTensorTakesNoMemory) {
  // The weight would have 4 TiB in fp32.
  const auto module = deferred_init([] {
    const at::Tensor weight = at::empty({1 << 20, 1 << 20});
    return weight.t().slice(0, 0, 10);
  });
  EXPECT_TRUE(is_deferred(module));
  EXPECT_EQ(module.size(1), 1 << 20);
}

TEST(DeferredInit, DataPointerOfADeferredTensorIsAnError) {
  const at::Tensor tensor = deferred_init([] { return at::zeros({3}); });
  EXPECT_THROW(tensor.data_ptr<float>(), c10::Error);
}

TEST(DeferredInit, UnusualInitialisationsEqualEager) {
  expect_equals_eager([]() -> std::shared_ptr<Module> { return std::make_shared<OddInit>(); });
}

/// Fills are so large that recording skips the draws. Fills begin and end at any position in the generator's words.
TEST(DeferredInit, LargeFillsEqualEagerAtAnyGeneratorState) {
  for (const std::int64_t numel : {4096, 4097, 4111, 5000, 10 * 624, 10 * 624 + 1, 100'003, 1'000'000}) {
    expect_equals_eager([numel]() -> std::shared_ptr<Module> {
      auto module = std::make_shared<Module>();
      // this moves the generator, so that the next draw begins at any position in its words
      module->register_parameter("before", at::randn({numel % 700}));
      module->register_parameter("normal", torch::nn::init::normal_(at::zeros({numel}), 1, 2));
      module->register_parameter("uniform", torch::nn::init::uniform_(at::zeros({numel / 2, 2})));
      module->register_parameter("constant", torch::nn::init::normal_(at::zeros({numel}), 1, 0));
      module->register_parameter("turned", torch::nn::init::normal_(at::zeros({2, numel / 2}).t(), 0, 1));
      module->register_parameter("wide", torch::nn::init::normal_(at::zeros({numel}, at::kDouble), 0, 1));
      module->register_parameter("after", at::randn({17}));
      return module;
    });
  }
}

TEST(DeferredInit, SkippedWordsLeaveTheGeneratorAsIfDrawn) {
  for (const std::uint64_t words : {0, 1, 622, 623, 624, 625, 1247, 1248, 100'000, 8192 * 624, 8193 * 624 + 7}) {
    for (const int drawn : {0, 1, 623, 624, 1000}) {
      at::Generator generator = at::detail::createCPUGenerator(7), skipped = at::detail::createCPUGenerator(7);
      const auto draw = [](at::Generator& from, std::uint64_t count) {
        for (std::uint64_t i = 0; i < count; ++i) from.get<at::CPUGeneratorImpl>()->random();
      };
      draw(generator, drawn + words);
      draw(skipped, drawn);
      skip_words(skipped, words);
      EXPECT_TRUE(at::equal(generator.get_state(), skipped.get_state())) << words << " after " << drawn;
    }
  }
}

TEST(DeferredInit, ShapesOnlyKeepsTheGeneratorAndHasNoValues) {
  torch::manual_seed(5);
  const at::Tensor next = at::randn({4});
  torch::manual_seed(5);
  auto module = shapes_only([] {
    torch::nn::Linear linear(300, 200);
    torch::nn::init::normal_(linear->weight, 0, 0.02);
    return linear;
  });
  EXPECT_TRUE(same_bits(next, at::randn({4}))) << "a draw moved the generator";
  EXPECT_TRUE(is_deferred(module->weight));
  EXPECT_EQ(module->weight.sizes(), (at::IntArrayRef{200, 300}));
  const auto message_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_NE(message_of([&] { materialize({module->weight}); }).find("shapes_only"), std::string::npos);
  EXPECT_NE(message_of([&] { materialize_module(*module); }).find("shapes_only"), std::string::npos);
  const auto reads = [] { return shapes_only([] { return at::randn({3}).sum().item<float>(); }); };
  EXPECT_NE(message_of(reads).find("shapes_only"), std::string::npos);
}

/// A draw of 4 Ti numbers takes no time.
TEST(DeferredInit, RecordingAHugeDrawTakesNoTime) {
  torch::manual_seed(5);
  const at::Tensor weight = deferred_init([] { return at::empty({1 << 21, 1 << 21}).uniform_(); });
  EXPECT_TRUE(is_deferred(weight));
}

TEST(DeferredInit, ReplayWithSeveralThreadsEqualsEager) {
  const int threads = at::get_num_threads();
  at::set_num_threads(4);
  expect_equals_eager([]() -> std::shared_ptr<Module> {
    auto module = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(300, 200), torch::nn::Linear(200, 300));
    for (int i = 0; i < 8; ++i) {
      const std::string name = std::to_string(i);
      module->register_parameter("randn" + name, at::randn({50, 3}) * 0.5);  // this draws from the shared generator
      const at::Tensor base = at::zeros({20}).normal_();
      module->register_parameter("sum" + name, base + at::randn({20}));  // adds a draw of normal_ and a draw of randn
      module->register_buffer("twice" + name, base * 2);
      const at::Tensor large = at::zeros({1'000'003 + i}).normal_();
      module->register_parameter("unit" + name, large / large.sum());  // a sum whose order depends on threads
    }
    return module;
  });
  at::set_num_threads(threads);
}

}  // namespace deferred_init_test
}  // namespace tessera
