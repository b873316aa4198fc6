#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace tessera::testing {

/// Returns fp32 numbers of a normal distribution, the same for the same seed.
inline std::vector<float> random_numbers(std::size_t numel, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(numel);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

}  // namespace tessera::testing
