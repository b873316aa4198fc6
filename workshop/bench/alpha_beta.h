#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// A message's size, and the time it took.
struct TimedBytes {
  std::int64_t bytes = 0;
  double seconds = 0;
};

/// Hockney's model: a message of b bytes takes alpha + beta b seconds.
struct AlphaBeta {
  double alpha_s = 0;          ///< cost of starting a message
  double beta_s_per_byte = 0;  ///< cost of each byte

  /// Returns the seconds for `bytes` that are sent in `messages` messages.
  double seconds_of(std::int64_t messages, std::int64_t bytes) const {
    return static_cast<double>(messages) * alpha_s + static_cast<double>(bytes) * beta_s_per_byte;
  }
};

/// Fits a line by least squares of the *relative* error, sum of ((alpha + beta b - t) / t)^2. Sizes differ by powers of
/// ten, and with absolute errors the largest size would decide alone. Throws `std::invalid_argument` if the points have
/// fewer than two sizes, or if a time is not above 0.
AlphaBeta fit_alpha_beta(std::span<const TimedBytes> points);

}  // namespace tessera
