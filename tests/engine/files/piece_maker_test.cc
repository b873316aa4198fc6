// Tests that pieces of a deferred tensor have the bits that the whole tensor would have.

#include "engine/init/piece_maker.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>
#include <torch/utils.h>

#include <cstring>
#include <functional>
#include <random>

#include "engine/init/mersenne_twister.h"
#include "tessera/deferred_init.h"

namespace tessera {
namespace piece_maker_test {

using ::testing::HasSubstr;
using Make = std::function<at::Tensor()>;

/// Returns whether `piece` has the bits of the elements of `whole` from `begin` on, in the order of memory.
bool same_bits(const at::Tensor& piece, const at::Tensor& whole, std::int64_t begin) {
  const at::Tensor flat = whole.as_strided({whole.numel()}, {1}).narrow(0, begin, piece.numel());
  const at::Tensor dense = piece.contiguous();
  return dense.scalar_type() == flat.scalar_type() &&
         std::memcmp(dense.const_data_ptr(), flat.const_data_ptr(), dense.nbytes()) == 0;
}

/// Checks random pieces. Also checks the whole tensor in pieces, once from front to back and once from back to front.
void expect_pieces_equal_eager(const Make& make) {
  const at::NoGradGuard no_grad;
  torch::manual_seed(11);
  const at::Tensor eager = make();
  torch::manual_seed(11);
  const at::Tensor deferred = deferred_init(make);
  std::optional<PieceMaker> maker = PieceMaker::of(deferred);
  ASSERT_TRUE(maker) << recipe_of(deferred);
  const std::int64_t numel = eager.numel();
  ASSERT_EQ(maker->numel(), numel);
  std::mt19937_64 random(5);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (int i = 0; i < 20; ++i) {
    const std::int64_t begin = below(numel), count = 1 + below(numel - begin);
    EXPECT_TRUE(same_bits(maker->make(begin, count), eager, begin)) << begin << " + " << count << " of " << numel;
  }
  for (const std::int64_t step : {16, 1000, 4096}) {
    PieceMaker other = maker->another();
    for (std::int64_t at = 0; at < numel; at += step) {
      ASSERT_TRUE(same_bits(other.make(at, std::min(step, numel - at)), eager, at)) << at << " of " << numel;
    }
  }
  for (std::int64_t at = numel; at > 0;) {
    const std::int64_t count = std::min<std::int64_t>(at, 777);
    at -= count;
    ASSERT_TRUE(same_bits(maker->make(at, count), eager, at)) << at << " of " << numel;
  }
}

TEST(PieceMaker, FillsOfEverySizeEqualEager) {
  for (const std::int64_t numel : {1, 15, 16, 17, 31, 4095, 4096, 4097, 4111, 5000, 6240, 6241, 40'003}) {
    for (const std::int64_t drawn_before : {0, 1, 300}) {
      SCOPED_TRACE(std::to_string(numel) + " after " + std::to_string(drawn_before));
      const auto after = [&](const Make& make) {
        expect_pieces_equal_eager([&] {
          at::zeros({drawn_before}).uniform_();
          return make();
        });
      };
      after([&] { return at::empty({numel}).uniform_(-0.1, 0.3); });
      after([&] { return at::empty({numel}).normal_(0.5, 0.02); });
      after([&] { return at::randn({numel}); });
      after([&] { return at::rand({numel}); });
    }
  }
}

TEST(PieceMaker, ConstantsAndElementWiseOperatorsEqualEager) {
  expect_pieces_equal_eager([] { return at::ones({70, 100}); });
  expect_pieces_equal_eager([] { return at::full({5000}, 0.1); });
  expect_pieces_equal_eager([] { return at::zeros({7000}).fill_(3); });
  expect_pieces_equal_eager([] { return at::randn({99, 50}) * 0.02; });
  expect_pieces_equal_eager([] { return (at::randn({99, 50}) / 3 + 1).clamp_(0.5, 1.5).neg(); });
  expect_pieces_equal_eager([] { return at::randn({4999}).add_(at::rand({4999})).sub(0.25).to(at::kBFloat16); });
  expect_pieces_equal_eager([] { return at::empty({6000}).copy_(at::randn({6000}, at::kFloat)).mul_(2); });
  expect_pieces_equal_eager([] { return torch::nn::init::kaiming_uniform_(at::empty({80, 90}), 2.2); });
  expect_pieces_equal_eager([] { return at::empty({80, 90}).uniform_().t(); });
}

TEST(PieceMaker, InitialisationsThatCannotBeCutAreReported) {
  const auto cannot = [](const Make& make) {
    const at::NoGradGuard no_grad;
    return !PieceMaker::of(deferred_init(make));
  };
  EXPECT_TRUE(cannot([] { return torch::nn::init::orthogonal_(at::empty({60, 90})); }));
  EXPECT_TRUE(cannot([] { return at::randn({70, 70}).tril(); }));
  EXPECT_TRUE(cannot([] { return at::arange(5000).to(at::kFloat); }));
  EXPECT_TRUE(cannot([] { return at::empty({5000}, at::kDouble).normal_(); })) << "words unknown";
  EXPECT_TRUE(cannot([] { return at::empty({5000}).exponential_(); }));
  EXPECT_TRUE(cannot([] { return at::empty({70, 80}).t().normal_(); })) << "not in the order of memory";
  EXPECT_TRUE(cannot([] { return at::randn({60, 1}) * at::randn({1, 60}); }));
  EXPECT_TRUE(cannot([] { return at::randn({5000}).add(at::randn({5000}), 0.3); })) << "a + alpha * b";
  EXPECT_TRUE(cannot([] {
    const at::Tensor rows = at::randn({50, 90});
    rows[3].zero_();
    return rows;
  }));
}

TEST(PieceMaker, GivenGeneratorStatesDecideTheValues) {
  const auto make = [](int seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    return deferred_init([] { return at::randn({5000}) * at::rand({5000}); });
  };
  const at::Tensor first = make(1), second = make(2);
  EXPECT_EQ(recipe_of(first), recipe_of(second));
  PieceMaker a = *PieceMaker::of(first), b = *PieceMaker::of(second);
  EXPECT_NE(a.states(), b.states());
  EXPECT_FALSE(same_bits(b.make(100, 700), materialize({first})[0], 100));
  b.set_states(a.states());
  EXPECT_TRUE(same_bits(b.make(100, 700), materialize({first})[0], 100));
}

TEST(PieceMaker, RecipeNamesOperatorsAndTheirNumbers) {
  const auto recipe = [](const Make& make) { return recipe_of(deferred_init(make)); };
  const std::string one = recipe([] { return at::empty({40, 50}).normal_(0, 0.02); });
  EXPECT_THAT(one, HasSubstr("aten::normal_(%0 Float[40, 50], 0., 0.02, -)"));
  EXPECT_EQ(one, recipe([] {
              at::randn({3});
              return at::empty({40, 50}).uniform_().normal_(0, 0.02);
            }));
  EXPECT_NE(one, recipe([] { return at::empty({40, 50}).normal_(0, 0.03); }));
  EXPECT_NE(one, recipe([] { return at::empty({40, 50}).uniform_(0, 0.02); }));
}

TEST(MersenneTwister, JumpEqualsThatManyBlocks) {
  std::mt19937 seed(5);
  mt19937::Block start;
  for (std::uint32_t& word : start) word = static_cast<std::uint32_t>(seed());
  for (const std::uint64_t blocks : {1, 2, 3, 31, 32, 33, 1000, 54'321}) {
    mt19937::Block stepped = start, jumped = start;
    for (std::uint64_t i = 0; i < blocks; ++i) mt19937::next_block(stepped);
    mt19937::jump(jumped, blocks);
    EXPECT_EQ(stepped, jumped) << blocks;
  }
  mt19937::Block once = start, twice = start;
  mt19937::jump(once, std::uint64_t{1} << 40);
  mt19937::jump(twice, (std::uint64_t{1} << 40) - 98'765);
  mt19937::jump(twice, 98'765);
  EXPECT_EQ(once, twice);
}

}  // namespace piece_maker_test
}  // namespace tessera
