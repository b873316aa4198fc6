#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/message_words.h"
#include "runtime/base/noise.h"

namespace tessera {

/// A codec that writes gradients as a few levels. It rounds stochastically, so that the mean of the decoded values is
/// the encoded value. A run of kMessageRun elements is written as a word with the run's norm (fp32), then a code for
/// each element, from -levels to levels. The code is the element's value divided by norm / levels, rounded. The last
/// run of a message may be shorter. A run with values that are not finite has a norm that is not finite. None of its
/// decoded values is finite. Any thread may call these functions.
inline constexpr std::int64_t kMostLevels = 127;

/// The norm that is stored with each run.
enum class LevelNorm {
  kSquares,    ///< the 2-norm (QSGD, arXiv 1610.02132, section 3.1)
  kMagnitude,  ///< the largest magnitude (TernGrad, arXiv 1705.07878, equation 3)
};

/// A codec of this kind: the number of levels, and the norm.
struct LevelForm {
  std::int64_t levels = 1;  ///< 1 to kMostLevels
  LevelNorm norm = LevelNorm::kSquares;
};

/// Writes level_words(levels, numel) words to `message`. The random bits of an element depend on its index in `values`.
void encode_levels(LevelForm form, const float* values, std::size_t numel, NoiseKey key, std::uint32_t* message);

/// Adds the message's values to `output` [numel].
void add_levels(LevelForm form, const std::uint32_t* message, std::size_t numel, float* output);

}  // namespace tessera
