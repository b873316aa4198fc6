#include "workshop/bench/alpha_beta.h"

#include <algorithm>
#include <stdexcept>

namespace tessera {

AlphaBeta fit_alpha_beta(std::span<const TimedBytes> points) {
  const bool one_size =
      std::all_of(points.begin(), points.end(), [&](const TimedBytes& p) { return p.bytes == points[0].bytes; });
  if (one_size) throw std::invalid_argument("a line needs points of two sizes or more");
  // Normal equations of the rows (1/t, b/t) with right-hand side 1.
  double a11 = 0, a12 = 0, a22 = 0, b1 = 0, b2 = 0;
  for (const TimedBytes& point : points) {
    if (!(point.seconds > 0)) throw std::invalid_argument("times must be above 0");
    const double x = 1 / point.seconds, y = static_cast<double>(point.bytes) / point.seconds;
    a11 += x * x, a12 += x * y, a22 += y * y;
    b1 += x, b2 += y;
  }
  const double determinant = a11 * a22 - a12 * a12;
  return {(b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant};
}

}  // namespace tessera
