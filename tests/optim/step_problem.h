#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "optim/optimizer.h"

namespace tessera {

/// Everything one optimizer call reads and writes, filled with values of many magnitudes: ordinary ones, subnormals,
/// zeros of both signs, infinities and NaN, so that "the same bits" is tested where rounding differs first.
struct StepProblem {
  std::vector<float> master, gradient, state0, state1;
  std::vector<std::uint16_t> half;
  std::vector<float> full;

  StepProblem(std::size_t numel, std::uint32_t seed, bool with_specials) : half(numel), full(numel) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-40, 6);
    auto fill = [&](std::vector<float>& values, bool positive) {
      values.resize(numel);
      for (float& x : values) {
        x = std::ldexp(normal(random), exponent(random));
        if (positive) x = x * x;
      }
    };
    fill(master, false);
    fill(gradient, false);
    fill(state0, false);
    fill(state1, true);
    if (!with_specials) return;
    const float specials[] = {0.0f, -0.0f, 1e-40f, -1e-45f, 3e38f, HUGE_VALF, -HUGE_VALF, NAN};
    for (std::size_t i = 0; i < numel; i += 7) gradient[i] = specials[(i / 7) % std::size(specials)];
  }

  /// The slice [begin, end), with parameters of `dtype`; kF64 stands for "no parameter beside the master".
  OptimizerSlice slice(std::size_t begin, std::size_t end, DType dtype, int num_states) {
    const std::size_t n = end - begin;
    OptimizerSlice slice;
    slice.master = {master.data() + begin, n};
    slice.gradient = {gradient.data() + begin, n};
    if (num_states >= 1) slice.state0 = {state0.data() + begin, n};
    if (num_states >= 2) slice.state1 = {state1.data() + begin, n};
    if (dtype == DType::kF64) return slice;
    slice.parameter_dtype = dtype;
    slice.parameter = dtype == DType::kF32 ? static_cast<void*>(full.data() + begin) : half.data() + begin;
    return slice;
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline bool same_bits(const StepProblem& a, const StepProblem& b) {
  return same_bits(a.master, b.master) && same_bits(a.state0, b.state0) && same_bits(a.state1, b.state1) &&
         same_bits(a.half, b.half) && same_bits(a.full, b.full);
}

/// Five steps on five parameters, the gradients of which are simple functions of the step; the reference values in
/// adamw_test.cc and sgd_test.cc are what PyTorch 2.11 gives for the same.
inline std::vector<float> five_steps(const Optimizer& optimizer, float lr, float gradient_scale = 1.0f) {
  std::vector<float> master = {0.5f, -1.25f, 3.0f, 1e-3f, -0.0625f};
  std::vector<float> state0(5), state1(5);
  for (int t = 1; t <= 5; ++t) {
    const auto x = static_cast<float>(t);
    std::vector<float> gradient = {0.1f * x, -0.02f * x * x, 0.3f / x, 1e-4f * x, -2.0f + 0.5f * x};
    for (float& g : gradient) g /= gradient_scale;
    OptimizerSlice slice{.master = master, .gradient = gradient, .state0 = state0, .state1 = state1};
    optimizer.step({.gradient_scale = gradient_scale, .lr = lr, .step = t}, slice);
  }
  return master;
}

}  // namespace tessera
