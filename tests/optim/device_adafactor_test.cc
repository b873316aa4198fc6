// Compares Adafactor by CUDA kernels with Adafactor by the CPU's loops. The bits are the same. The program is built
// twice (device_problem.h).

#include "optim/cuda/device_adafactor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/adafactor_numbers.h"
#include "tests/optim/device_memory.h"

namespace tessera {
namespace device_adafactor_test {

using DeviceAdafactor = DeviceKernels;

struct Shape {
  std::size_t matrices, rows, columns;
  bool is_vector = false;

  std::size_t numel() const { return matrices * rows * columns; }
};

Shape vector_of(std::size_t numel) { return {1, 1, numel, true}; }

std::string name_of(const Shape& s) {
  return std::to_string(s.matrices) + " x " + std::to_string(s.rows) + " x " + std::to_string(s.columns) +
         (s.is_vector ? ", a vector" : "");
}

AdafactorTensor tensor_of(const Shape& s, float* parameter, float* gradient, float* row_var, float* col_var,
                          float* variance) {
  AdafactorTensor t;
  t.matrices = static_cast<std::int64_t>(s.matrices);
  t.rows = static_cast<std::int64_t>(s.rows);
  t.columns = static_cast<std::int64_t>(s.columns);
  t.parameter = {parameter, s.numel()};
  t.gradient = {gradient, s.numel()};
  if (s.is_vector) {
    t.variance = {variance, s.numel()};
  } else {
    t.row_var = {row_var, s.matrices * s.rows};
    t.col_var = {col_var, s.matrices * s.columns};
  }
  return t;
}

/// A tensor and its states. Each array has more numbers behind it, and these must not change.
struct Values {
  static constexpr std::size_t kBehind = 8;

  Shape shape;
  std::vector<float> parameter = all(shape.numel()), gradient = all(shape.numel()),
                     row_var = all(shape.matrices * shape.rows), col_var = all(shape.matrices * shape.columns),
                     variance = all(shape.numel());

  static std::vector<float> all(std::size_t count) { return std::vector<float>(count + kBehind, 0.0f); }
  AdafactorTensor tensor() {
    return tensor_of(shape, parameter.data(), gradient.data(), row_var.data(), col_var.data(), variance.data());
  }
};

struct DeviceValues {
  explicit DeviceValues(const Values& v)
      : shape(v.shape),
        parameter(v.parameter),
        gradient(v.gradient),
        row_var(v.row_var),
        col_var(v.col_var),
        variance(v.variance) {}
  AdafactorTensor tensor() const {
    return tensor_of(shape, parameter.data(), gradient.data(), row_var.data(), col_var.data(), variance.data());
  }

  Shape shape;
  Shared<float> parameter, gradient, row_var, col_var, variance;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same_bits(const DeviceValues& got, const Values& wanted) {
  EXPECT_TRUE(same_bits(got.parameter.values(), wanted.parameter)) << "parameter";
  EXPECT_TRUE(same_bits(got.gradient.values(), wanted.gradient)) << "update";
  EXPECT_TRUE(same_bits(got.row_var.values(), wanted.row_var)) << "row_var";
  EXPECT_TRUE(same_bits(got.col_var.values(), wanted.col_var)) << "col_var";
  EXPECT_TRUE(same_bits(got.variance.values(), wanted.variance)) << "variance";
}

/// Draws numbers of many magnitudes, with zeros among them, and some numbers whose squares fp32 cannot hold.
class Numbers {
 public:
  explicit Numbers(std::uint32_t seed) : random_(seed) {}
  void fill(std::vector<float>& values, std::size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t kind = random_() % 4096;
      const float size = kind == 0 ? 0.0f : kind == 1 ? 1e10f : kind == 2 ? 1e-30f : 1.0f;
      values[i] = scale * size * normal(random_);
    }
  }

 private:
  std::mt19937 random_;
};

struct Case {
  AdafactorConfig config = {};
  double lr = 1e-2, weight_decay = 0.1;
  float parameters = 0.1f, gradients = 1.0f;  ///< the random values have these scales
};

/// Compares three steps of the kernels and of the loops.
void compare(const Shape& shape, const Case& c) {
  SCOPED_TRACE(name_of(shape) + ", lr " + std::to_string(c.lr));
  Values values{shape};
  Numbers numbers(static_cast<std::uint32_t>(shape.numel()));
  numbers.fill(values.parameter, shape.numel(), c.parameters);
  const DeviceValues device(values);
  // Marker values show whether anything is read before it is written, and whether anything is written behind the
  // scratch memory.
  constexpr double kMark = -7;
  const std::size_t count = adafactor_scratch(values.tensor());
  std::vector<double> scratch_before(count + 8, kMark);
  std::fill_n(scratch_before.begin(), count, std::numeric_limits<double>::quiet_NaN());
  const Shared<double> scratch(scratch_before);
  for (std::int64_t t = 1; t <= 3; ++t) {
    numbers.fill(values.gradient, shape.numel(), c.gradients);
    device.gradient.values();  // this waits for the device
    std::copy(values.gradient.begin(), values.gradient.end(), device.gradient.data());
    const AdafactorStep step{c.lr, c.weight_decay, t};
    check(cuda::step_adafactor(c.config, step, device.tensor(), {scratch.data(), count}, nullptr));
    step_adafactor(c.config, step, values.tensor());
    expect_same_bits(device, values);
  }
  const std::vector<double> scratch_after = scratch.values();
  EXPECT_TRUE(std::all_of(scratch_after.begin() + static_cast<long>(count), scratch_after.end(),
                          [](double x) { return x == kMark; }));
}

const std::vector<Shape> kShapes = {
    {1, 1, 1},   {1, 7, 5},    {1, 1, 300},   {1, 300, 1},     {1, 256, 8},     {1, 257, 33},    {1, 600, 100},
    {40, 3, 3},  {9, 1, 1},    {300, 2, 1},   {2, 513, 70},    {1, 64, 5000},   {3, 1, 4097},    {1, 4097, 1},
    {5, 300, 2}, vector_of(1), vector_of(31), vector_of(4095), vector_of(4096), vector_of(4097), vector_of(140000)};

TEST_F(DeviceAdafactor, StepGivesTheCpusBits) {
  // The value 1e-2 is below 1 / sqrt(step), and 0.9 is above it from step 2 on.
  for (const Shape& shape : kShapes) {
    for (const double lr : {1e-2, 0.9}) compare(shape, {.lr = lr});
  }
}

TEST_F(DeviceAdafactor, StepAtItsBoundsGivesTheCpusBits) {
  for (const Shape& shape : {Shape{1, 257, 33}, Shape{40, 3, 3}, vector_of(4097)}) {
    compare(shape, {.parameters = 0});  // this case needs min_rms
    compare(shape, {.gradients = 0});   // this gives the smallest second moment
    compare(shape, {.parameters = 0, .gradients = 0});
    compare(shape, {.gradients = 1e-20f});
    compare(shape, {.config = {.clip_threshold = 1e-3}});  // this limit clips
    compare(shape, {.config = {.clip_threshold = 1e6}});   // this limit does not clip
    compare(shape, {.config = {.beta2_decay = -0.5, .min_rms = 10}, .weight_decay = 0});
  }
}

// The order of an fp64 sum shows in fp32 if the sum lies between two fp32 numbers, as 1 + 2^-24 does. Small numbers
// that are added to such a sum one by one are lost, and the sum is rounded down. Small numbers that are first added to
// each other are not lost, and the sum is rounded up. The seeds were chosen so that every other order that was tried
// gives different bits.

/// Returns zeros, with a small number in about one place of every `every` places. A small number is `unit` or 1.125 *
/// `unit`. `unit` is the root of 2^-54 if squares are summed, and 2^-54 otherwise. Four small numbers, or their
/// squares, then add up to an ulp of 1 in fp64 or to a little more.
std::vector<float> few_small(std::mt19937& random, std::size_t count, std::size_t every, float unit) {
  std::vector<float> values = Values::all(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (random() % every == 0) values[i] = random() % 2 == 0 ? unit : unit * 1.125f;
  }
  return values;
}

void expect_same_step(Values values, const AdafactorConfig& config, const AdafactorStep& step) {
  const DeviceValues device(values);
  const Shared<double> scratch{std::vector<double>(adafactor_scratch(values.tensor()))};
  check(cuda::step_adafactor(config, step, device.tensor(), {scratch.data(), adafactor_scratch(values.tensor())},
                             nullptr));
  step_adafactor(config, step, values.tensor());
  expect_same_bits(device, values);
}

TEST_F(DeviceAdafactor, SumsRowsAndColumnsInTheCpusOrder) {
  std::mt19937 random(1);
  constexpr std::size_t kSize = 512;
  Values values{{1, kSize, kSize}};
  values.gradient = few_small(random, kSize * kSize, 128, 0x1p-27f);
  for (std::size_t r = 0; r < kSize; ++r) {
    values.gradient[r * kSize + (r * 93 + 7) % kSize] = 1.0f + 0x1p-12f;  // the square is 1 + 2^-11 + 2^-24
  }
  expect_same_step(values, {}, {.lr = 0.1});
}

TEST_F(DeviceAdafactor, SumsWholeTensorsInTheCpusOrder) {
  std::mt19937 random(2);
  constexpr std::size_t kNumel = 1 << 18;  // 64 blocks; the number is a square, so the root is exact
  for (int trial = 0; trial < 48; ++trial) {
    Values values{vector_of(kNumel)};
    values.parameter = few_small(random, kNumel, kNumel / (trial % 2 == 0 ? 4 : 2), 0x1p-27f);
    values.gradient.assign(values.gradient.size(), 1.0f);
    // The squares add up to (1 + 2^-24)^2 + 2^-52. The last term adds half an fp64 ulp to the root.
    for (const float x : {1.0f, 0x1p-12f, 0x1p-12f, 0x1p-24f, 0x1p-26f}) {
      values.parameter[random() % (trial % 2 == 0 ? kNumel : kAdafactorBlock)] = x;
    }
    // The blocks that get a tiny number are 16 blocks away from each other.
    for (std::size_t block = 0; trial % 2 != 0 && block < kNumel; block += 16 * kAdafactorBlock) {
      values.parameter[block + random() % kAdafactorBlock] = 0x1p-27f * 1.25f;
    }
    expect_same_step(values, {.clip_threshold = 1e6}, {.lr = 0.5});
  }
}

TEST_F(DeviceAdafactor, SumsVariancesOfRowsInTheCpusOrder) {
  std::mt19937 random(3);
  constexpr std::size_t kMatrices = 64, kRows = 128, kColumns = 16;
  Values values{{kMatrices, kRows, kColumns}};
  Numbers(3).fill(values.gradient, kMatrices * kRows * kColumns);
  values.row_var = few_small(random, kMatrices * kRows, 32, 0x1p-54f);
  for (std::size_t i = 0; i < kMatrices; ++i) {
    const std::size_t row = random() % kRows;
    values.row_var[i * kRows + row] = 1.0f;
    values.row_var[i * kRows + row / 2 + (row < 2 ? 2 : 0)] = 0x1p-24f;
  }
  std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
  for (float& variance : values.col_var) variance = uniform(random);
  expect_same_step(values, {.beta2_decay = -2000}, {.lr = 0.1, .step = 2});  // the step does not change the states
}

TEST_F(DeviceAdafactor, TooLittleScratchIsRefusedAndEmptyTensorsAreNoOps) {
  Values values{{1, 600, 3}};
  const DeviceValues device(values);
  const std::size_t count = adafactor_scratch(values.tensor());
  EXPECT_EQ(count, 1U + 2 * 1 + 3 * 3 + 1);
  const Shared<double> scratch{std::vector<double>(count)};
  EXPECT_EQ(cuda::step_adafactor({}, {}, device.tensor(), {scratch.data(), count - 1}, nullptr), cudaErrorInvalidValue);
  expect_same_bits(device, values);

  for (const Shape& shape : {Shape{0, 3, 4}, Shape{2, 0, 4}, Shape{2, 3, 0}, vector_of(0)}) {
    Values empty{shape};
    const DeviceValues of_device(empty);
    EXPECT_EQ(adafactor_scratch(empty.tensor()), 0U);
    check(cuda::step_adafactor({}, {.lr = 0.1}, of_device.tensor(), {}, nullptr));
    step_adafactor({}, {.lr = 0.1}, empty.tensor());
    expect_same_bits(of_device, empty);
  }
}

// ---- the formulas in fp64, sums from the first number to the last ---------------------------------------------------

double rms(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

/// Adafactor's first step, in which the states are the means themselves.
struct PlainStep {
  std::vector<double> parameter, row_var, col_var, variance;

  PlainStep(const AdafactorConfig& config, double lr, const Values& v)
      : row_var(v.shape.matrices * v.shape.rows), col_var(v.shape.matrices * v.shape.columns) {
    const Shape& s = v.shape;
    const auto rows = static_cast<double>(s.rows), columns = static_cast<double>(s.columns);
    std::vector<double> update(s.numel()), matrix_mean(s.matrices);
    parameter.assign(v.parameter.begin(), v.parameter.begin() + static_cast<long>(s.numel()));
    for (std::size_t i = 0; i < s.numel(); ++i) {
      const double g = v.gradient[i];
      variance.push_back(g * g);
      row_var[i / s.columns] += g * g / columns;
      col_var[i / (s.rows * s.columns) * s.columns + i % s.columns] += g * g / rows;
      matrix_mean[i / (s.rows * s.columns)] += g * g / (rows * columns);
    }
    for (std::size_t i = 0; i < s.numel(); ++i) {
      const std::size_t matrix = i / (s.rows * s.columns);
      const double v_i = s.is_vector ? variance[i]
                                     : row_var[i / s.columns] * col_var[matrix * s.columns + i % s.columns] /
                                           std::max(matrix_mean[matrix], 0x1p-23);
      update[i] = v.gradient[i] / std::sqrt(std::max(v_i, 0x1p-46));
    }
    const double length = std::max(config.min_rms, rms(parameter)) * std::min(lr, 1.0);
    const double clip = std::max(1.0, rms(update) / config.clip_threshold);
    for (std::size_t i = 0; i < s.numel(); ++i) parameter[i] -= update[i] * length / clip;
  }
};

void expect_near(const float* got, const std::vector<double>& wanted, const char* what) {
  double most = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    most = std::max(most, std::abs(got[i] - wanted[i]) / (std::abs(wanted[i]) + 1));
  }
  EXPECT_LT(most, 1e-6) << what;
}

/// The sums leave out no number. The last numbers are so large that a sum without them would differ.
TEST_F(DeviceAdafactor, SumsMissNoNumber) {
  for (const Shape& shape : {Shape{1, 700, 90}, Shape{3, 300, 4100}, Shape{1, 31, 9000}, Shape{1, 9000, 31},
                             Shape{50, 5, 3}, vector_of(140000), vector_of(4097)}) {
    SCOPED_TRACE(name_of(shape));
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    Values values{shape};
    for (std::size_t i = 0; i < shape.numel(); ++i) {
      values.parameter[i] = uniform(random);
      values.gradient[i] = uniform(random);
    }
    const float large = 0.3f * std::sqrt(static_cast<float>(shape.numel()));
    values.parameter[shape.numel() - 1] = values.gradient[shape.numel() - 1] = large;
    const AdafactorConfig config{.clip_threshold = 0.5};
    const PlainStep wanted(config, 2.0, values);
    step_adafactor(config, {.lr = 2.0}, values.tensor());
    expect_near(values.parameter.data(), wanted.parameter, "parameter");
    if (shape.is_vector) {
      expect_near(values.variance.data(), wanted.variance, "variance");
    } else {
      expect_near(values.row_var.data(), wanted.row_var, "row_var");
      expect_near(values.col_var.data(), wanted.col_var, "col_var");
    }
  }
}

}  // namespace device_adafactor_test
}  // namespace tessera
