// Compares checkpoint() with the same function without it: both have the same bits. The tests also check which tensors
// are stored, what runs again, and what is refused.

#include "tessera/recompute.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <stdexcept>

#include "tests/support/small_models.h"

namespace tessera::testing {
namespace recompute_test {

using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

struct Parameters {
  at::Tensor first = at::randn({8, 8}).set_requires_grad(true), second = at::randn({8, 8}).set_requires_grad(true);
};

/// Runs two layers with dropout between them. The last operator, an addition, saves no tensors.
at::Tensor layers(const Parameters& p, const at::Tensor& x) {
  const at::Tensor hidden = at::dropout(at::gelu(at::matmul(x, p.first)), 0.3, /*train=*/true);
  return x + at::matmul(hidden, p.second);
}

class Recompute : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(5);
    p = Parameters();
    input = at::randn({4, 8}).set_requires_grad(true);
  }
  /// Calls backward `backwards` times over one graph. Returns the loss, random numbers drawn before and after backward,
  /// and the gradients of the parameters and of the input.
  Tensors gradients_of(const std::function<at::Tensor(const at::Tensor&)>& model, int backwards = 1) {
    for (at::Tensor* tensor : {&p.first, &p.second, &input}) tensor->mutable_grad() = at::Tensor();
    at::manual_seed(7);
    const at::Tensor loss = model(input * 2).square().sum();
    const at::Tensor drawn = at::rand({3});  // the second run must leave the generator as it was
    for (int i = 0; i < backwards; ++i) loss.backward({}, /*retain_graph=*/i + 1 < backwards);
    return {loss.detach(), drawn, at::rand({3}), p.first.grad(), p.second.grad(), input.grad()};
  }
  void expect_same(const Tensors& got, const Tensors& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], wanted[i])) << i;
  }

  Parameters p;
  at::Tensor input;
};

TEST_F(Recompute, GradientsHaveTheBitsOfTheFunctionItself) {
  const auto plain = [&](const at::Tensor& x) { return layers(p, layers(p, x)); };
  const auto again = [&](const at::Tensor& x) {
    return checkpoint([&](const at::Tensor& y) { return layers(p, y); },
                      checkpoint([&](const at::Tensor& y) { return layers(p, y); }, x));
  };
  const auto nested = [&](const at::Tensor& x) {
    return checkpoint(
        [&](const at::Tensor& y) {
          return layers(p, checkpoint([&](const at::Tensor& z) { return layers(p, z); }, y));
        },
        x);
  };
  for (const int backwards : {1, 2}) {
    const Tensors wanted = gradients_of(plain, backwards);
    expect_same(gradients_of(again, backwards), wanted);
    expect_same(gradients_of(nested, backwards), wanted);
  }
}

TEST_F(Recompute, SecondDerivativesHaveTheBitsOfTheFunctionItself) {
  const auto second_derivative = [&](bool recomputes) {
    const auto run = [&](const at::Tensor& x) { return at::tanh(at::matmul(x, p.first)); };
    const at::Tensor y = (recomputes ? checkpoint(run, input) : run(input)).sum();
    const at::Tensor slope = torch::autograd::grad({y}, {input}, {}, true, /*create_graph=*/true).at(0);
    return torch::autograd::grad({slope.square().sum()}, {input}).at(0);
  };
  EXPECT_TRUE(same_bits(second_derivative(true), second_derivative(false)));
}

TEST_F(Recompute, IntermediatesAreNotKeptAndFreedAfterBackward) {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> hidden;
  const auto run = [&](const at::Tensor& x) {
    const at::Tensor h = at::matmul(x, p.first);
    hidden.emplace(h.storage().getWeakStorageImpl());
    return at::matmul(at::tanh(h), p.second);
  };
  const at::Tensor loss = checkpoint(run, input).sum();
  EXPECT_EQ(hidden->use_count(), 0u);
  loss.backward();
  EXPECT_EQ(hidden->use_count(), 0u);
}

TEST_F(Recompute, SecondRunStopsOnceBackwardHasItsInputs) {
  int begun = 0, ended = 0;
  const auto run = [&](const at::Tensor& x) {
    ++begun;
    at::Tensor y = layers(p, x);
    ++ended;
    return y;
  };
  checkpoint(run, input).sum().backward();
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);
}

TEST_F(Recompute, FunctionRunsOnceWithoutGradMode) {
  int runs = 0;
  const at::NoGradGuard no_grad;
  checkpoint([&](const at::Tensor& x) { return ++runs, layers(p, x); }, input);
  EXPECT_EQ(runs, 1);
}

TEST_F(Recompute, ParametersGetGradientsThoughNoInputNeedsThem) {
  const at::Tensor x = at::randn({4, 8});
  const auto gradient = [&](bool recomputes) {
    p.first.mutable_grad() = at::Tensor();
    const auto run = [&](const at::Tensor& y) { return at::matmul(at::gelu(at::matmul(y, p.first)), p.second); };
    (recomputes ? checkpoint(run, x) : run(x)).sum().backward();
    return p.first.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST_F(Recompute, InputsMayBeUndefined) {
  const TensorFunction run = [&](const Tensors& inputs) {
    EXPECT_FALSE(inputs.at(1).defined());
    return Tensors{at::matmul(at::gelu(inputs[0]), p.first)};
  };
  checkpoint(run, {input, at::Tensor()}).at(0).sum().backward();
  EXPECT_TRUE(input.grad().defined());
}

/// Returns the text of the exception that backward throws.
std::string error_of(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(Recompute, FunctionThatChangesBetweenRunsIsAnError) {
  int runs = 0;
  const auto grows = [&](const at::Tensor& x) { return at::tanh(at::cat(Tensors(++runs, x))); };
  EXPECT_THAT(error_of(checkpoint(grows, input).sum()), HasSubstr("It must compute the same both times"));
  runs = 0;
  const auto shrinks = [&](const at::Tensor& x) { return ++runs == 1 ? at::tanh(at::exp(x)) : x; };
  EXPECT_THAT(error_of(checkpoint(shrinks, input).sum()), HasSubstr("fewer tensors"));
}

TEST_F(Recompute, WritesInPlaceAreNoticed) {
  const at::Tensor x = input * 2;
  const at::Tensor loss = checkpoint([&](const at::Tensor& y) { return layers(p, y); }, x).sum();
  {
    const at::NoGradGuard no_grad;
    x.add_(1);
  }
  EXPECT_THAT(error_of(loss), HasSubstr("modified by an inplace operation"));
  const auto writes = [&](const at::Tensor& y) {
    at::Tensor h = at::exp(y);  // this operator saves its result
    h.add_(1);
    return at::matmul(h, p.first);
  };
  EXPECT_THAT(error_of(checkpoint(writes, input).sum()), HasSubstr("modified by an inplace operation"));
}

TEST_F(Recompute, WritesToCapturedTensorsAreNoticed) {
  const at::Tensor weight = at::randn({8, 8}).set_requires_grad(true), mask = at::rand({4, 8});
  for (const at::Tensor& read : {weight, mask}) {
    const auto run = [&](const at::Tensor& x) { return at::matmul(x * mask, weight.t()); };
    const at::Tensor loss = checkpoint(run, input).sum();
    const at::NoGradGuard no_grad;
    read.add_(1);
    EXPECT_THAT(error_of(loss), HasSubstr("modified by an inplace operation"));
  }
}

TEST_F(Recompute, ParameterUnfrozenBetweenRunsIsNoticed) {
  const at::Tensor weight = at::randn({8, 8});
  const at::Tensor square = at::randn({8, 8}).set_requires_grad(true);
  const auto run = [&](const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); };
  const at::Tensor loss = checkpoint(run, square * 2).sum();
  weight.set_requires_grad(true);  // now the product saves its other factor too
  EXPECT_THAT(error_of(loss), HasSubstr("frozen or unfrozen"));
}

/// Tests SGD under autocast. The program empties autocast's cache of casts at the end of forward, as torch.autocast
/// does.
TEST_F(Recompute, AutocastCastsAreRedoneAfterTheStep) {
  const auto trained = [&](bool recomputes) {
    at::manual_seed(11);
    const at::Tensor weight = at::randn({8, 8}).set_requires_grad(true), x = at::randn({4, 8}).set_requires_grad(true);
    const auto run = [&](const at::Tensor& y) { return at::matmul(at::tanh(at::matmul(y, weight)), weight); };
    for (int step = 0; step < 3; ++step) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
      const at::Tensor loss = (recomputes ? checkpoint(run, x) : run(x)).to(at::kFloat).square().mean();
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      loss.backward();
      const at::NoGradGuard no_grad;
      weight.sub_(weight.grad(), 0.5);
      weight.mutable_grad() = at::Tensor();
    }
    return weight.detach();
  };
  EXPECT_TRUE(same_bits(trained(true), trained(false)));
}

TEST_F(Recompute, FunctionMayRunABackwardOfItsOwn) {
  const auto penalised = [&](bool recomputes) {
    p.first.mutable_grad() = at::Tensor();
    const auto run = [&](const at::Tensor& x) {
      const at::Tensor y = at::tanh(at::matmul(x, p.first));
      const at::Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true).at(0);
      return y * slope;
    };
    (recomputes ? checkpoint(run, input) : run(input)).sum().backward();
    return p.first.grad();
  };
  EXPECT_TRUE(same_bits(penalised(true), penalised(false)));
}

TEST_F(Recompute, FunctionThatCatchesTheEarlyEndRunsOn) {
  const auto gradient = [&](bool recomputes) {
    input.mutable_grad() = at::Tensor();
    const auto run = [&](const at::Tensor& x) {
      try {
        return at::matmul(at::gelu(x), p.first);
      } catch (...) {
        return at::tanh(at::gelu(at::exp(x)));
      }
    };
    (recomputes ? checkpoint(run, input) : run(input)).sum().backward();
    return input.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST_F(Recompute, ExceptionPassesThroughAndTheNextCallRuns) {
  int runs = 0;
  const auto fails = [&](const at::Tensor& x) {
    if (++runs == 2) throw std::runtime_error("no more");
    return layers(p, x);
  };
  const at::Tensor loss = checkpoint(fails, input).sum();
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
  loss.backward();
  EXPECT_EQ(runs, 3);
  const auto catches = [&](const at::Tensor& x) {
    try {
      return layers(p, x);
    } catch (const std::exception&) {
      ADD_FAILURE() << "the end of the second run is no std::exception";
      throw;
    }
  };
  checkpoint(catches, input).sum().backward();
}

}  // namespace recompute_test
}  // namespace tessera::testing
