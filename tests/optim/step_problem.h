#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/step_arguments.h"
#include "optim/optimizer.h"

namespace tessera {

/// The types that a problem's parameters and states have.
struct Formats {
  WeightFormat weights = WeightFormat::kF32;
  std::vector<StateInfo> states = {{"exp_avg"}, {"exp_avg_sq"}};

  Formats() = default;
  Formats(WeightFormat weights, const Optimizer& optimizer) : weights(weights), states(optimizer.states()) {}
  bool has_blocks() const { return !states.empty() && states[0].dtype == StateDType::k8Bit; }
};

/// Everything that one optimizer call reads and writes. The values have many magnitudes: there are ordinary numbers,
/// subnormals, zeros of both signs, infinities and NaN. Differences in rounding show in such values first, so the tests
/// compare their bits. Two problems with the same seed hold the same values in every format that can hold them.
struct StepProblem {
  Formats formats;
  std::vector<float> master, gradient, copy;
  std::vector<std::uint16_t> half;  // bf16 or fp16 copy, or the high half of a split master
  std::vector<std::int16_t> low;
  std::array<std::vector<std::byte>, kMostStates> state;
  std::array<std::vector<float>, kMostStates> scales;

  StepProblem(std::size_t numel, std::uint32_t seed, bool with_specials, Formats formats_given = {})
      : formats(std::move(formats_given)), master(numel), gradient(numel), copy(numel), half(numel), low(numel) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-40, 6);
    const auto fill = [&](std::vector<float>& values) {
      for (float& x : values) x = std::ldexp(normal(random), exponent(random));
    };
    fill(master);
    fill(gradient);
    for (std::size_t i = 0; i < formats.states.size(); ++i) {
      std::vector<float> values(numel);
      fill(values);
      if (is_square(formats.states[i].name)) {
        for (float& x : values) x = x * x;
      }
      keep_state(i, values);
    }
    if (formats.weights == WeightFormat::kSplitBF16) split_masters();
    if (!with_specials) return;
    const float specials[] = {0.0f, -0.0f, 1e-40f, -1e-45f, 3e38f, HUGE_VALF, -HUGE_VALF, NAN};
    for (std::size_t i = 0; i < numel; i += 7) gradient[i] = specials[(i / 7) % std::size(specials)];
  }

  /// Returns the slice [begin, end).
  OptimizerSlice slice(std::size_t begin, std::size_t end) {
    const std::size_t n = end - begin;
    OptimizerSlice slice{.gradient = {gradient.data() + begin, n}, .first_element = begin, .stream = 5};
    if (formats.weights == WeightFormat::kSplitBF16) {
      slice.master_kind = MasterKind::kSplitBF16;
      slice.low = {low.data() + begin, n};
    } else {
      slice.master = {master.data() + begin, n};
    }
    if (formats.weights == WeightFormat::kF32AndF32) slice.parameter = copy.data() + begin;
    if (formats.weights == WeightFormat::kF32AndF16) slice.parameter_dtype = DType::kF16;
    if (formats.weights == WeightFormat::kF32AndBF16 || formats.weights == WeightFormat::kSplitBF16) {
      slice.parameter_dtype = DType::kBF16;
    }
    if (slice.parameter_dtype != DType::kF32) slice.parameter = half.data() + begin;
    for (std::size_t i = 0; i < formats.states.size(); ++i) slice.states[i] = state_slice(i, begin, n);
    return slice;
  }

  /// Returns the masters as fp32 numbers, whatever form the masters have.
  std::vector<float> masters() const {
    if (formats.weights != WeightFormat::kSplitBF16) return master;
    std::vector<float> joined(master.size());
    for (std::size_t i = 0; i < joined.size(); ++i) {
      joined[i] = std::bit_cast<float>(join_split<std::uint32_t>(half[i], static_cast<std::uint32_t>(low[i])));
    }
    return joined;
  }

 private:
  static bool is_square(const std::string& name) {
    return name == "exp_avg_sq" || name == "square_avg" || name == "sum";
  }

  void keep_state(std::size_t which, const std::vector<float>& values) {
    const StateDType dtype = formats.states[which].dtype;
    const StateBytes bytes = state_bytes(dtype, static_cast<std::int64_t>(values.size()));
    state[which].resize(static_cast<std::size_t>(bytes.data));
    scales[which].resize(static_cast<std::size_t>(bytes.scales) / sizeof(float));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(values[i]);
      if (dtype == StateDType::kF32) std::memcpy(&state[which][4 * i], &bits, 4);
      const auto upper = static_cast<std::uint16_t>(bits >> 16);
      if (dtype == StateDType::kBF16) std::memcpy(&state[which][2 * i], &upper, 2);
      if (dtype == StateDType::k8Bit) state[which][i] = std::byte(bits >> 11);  // every code is valid
    }
    for (std::size_t block = 0; block < scales[which].size(); ++block) {
      scales[which][block] = std::fabs(values[kStateBlock * block]);
    }
  }

  void split_masters() {
    for (std::size_t i = 0; i < master.size(); ++i) {
      const auto bits = splittable<std::uint32_t>(master[i]);
      half[i] = static_cast<std::uint16_t>(split_high(bits));
      low[i] = static_cast<std::int16_t>(split_low(bits));
    }
  }

  StateSlice state_slice(std::size_t which, std::size_t begin, std::size_t n) {
    const StateDType dtype = formats.states[which].dtype;
    const std::size_t element_bytes = static_cast<std::size_t>(state_bytes(dtype, 1).data);
    StateSlice slice{.data = {state[which].data() + begin * element_bytes, n * element_bytes}, .scales = {}};
    const auto count =
        static_cast<std::size_t>(state_bytes(dtype, static_cast<std::int64_t>(n)).scales) / sizeof(float);
    if (count > 0) slice.scales = {scales[which].data() + begin / kStateBlock, count};
    return slice;
  }
};

/// Returns an fp32 state whose memory is a vector of floats.
inline StateSlice f32_state(std::vector<float>& values) {
  return {.data = std::as_writable_bytes(std::span(values)), .scales = {}};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

inline bool same_bits(const StepProblem& a, const StepProblem& b) {
  for (std::size_t i = 0; i < kMostStates; ++i) {
    if (!same_bits(a.state[i], b.state[i]) || !same_bits(a.scales[i], b.scales[i])) return false;
  }
  return same_bits(a.master, b.master) && same_bits(a.half, b.half) && same_bits(a.low, b.low) &&
         same_bits(a.copy, b.copy);
}

/// A few parameters that an optimizer with fp32 states trains.
struct Trained {
  const Optimizer& optimizer;
  std::vector<float> weights;
  std::array<std::vector<float>, kMostStates> states = {};
  std::int64_t steps = 0;

  void step(std::vector<float> gradient, StepScalars scalars) {
    OptimizerSlice slice{.gradient = gradient, .master = weights};
    for (std::size_t i = 0; i < optimizer.states().size(); ++i) {
      states[i].resize(weights.size());
      slice.states[i] = f32_state(states[i]);
    }
    scalars.step = ++steps;
    optimizer.step(scalars, slice);
  }
};

/// Makes five steps on five parameters, whose gradients are simple functions of the step. The reference values in
/// rules_test.cc are those of PyTorch 2.11 for the same steps.
inline std::vector<float> five_steps(const Optimizer& optimizer, StepScalars scalars) {
  Trained run{optimizer, {0.5f, -1.25f, 3.0f, 1e-3f, -0.0625f}};
  for (int t = 1; t <= 5; ++t) {
    const auto x = static_cast<float>(t);
    std::vector<float> gradient = {0.1f * x, -0.02f * x * x, 0.3f / x, 1e-4f * x, -2.0f + 0.5f * x};
    for (float& g : gradient) g /= scalars.gradient_scale;
    run.step(gradient, scalars);
  }
  return run.weights;
}

}  // namespace tessera
