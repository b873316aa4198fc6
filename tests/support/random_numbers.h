#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace tessera::testing {

/// Returns fp32 numbers of a normal distribution. The same seed gives the same numbers.
inline std::vector<float> random_numbers(std::size_t numel, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(numel);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

}  // namespace tessera::testing
