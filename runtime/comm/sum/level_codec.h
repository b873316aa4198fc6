#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/message_words.h"
#include "runtime/base/noise.h"

namespace tessera {

/// Gradients as few levels, rounded stochastically, so that the mean of what is decoded is what was encoded: in runs of kMessageRun elements
/// a word with the run's norm (fp32), then a code for each element, from -levels to levels: its value beside the norm. The last run of a
/// message may be shorter. Values that are not finite make a norm that is not, and with it all that is decoded of the run.
inline constexpr std::int64_t kMostLevels = 127;

enum class LevelNorm {
  kSquares,    ///< the 2-norm (QSGD, arXiv 1610.02132, section 3.1)
  kMagnitude,  ///< the largest magnitude (TernGrad, arXiv 1705.07878, equation 3)
};

struct LevelForm {
  std::int64_t levels = 1;  ///< 1 to kMostLevels
  LevelNorm norm = LevelNorm::kSquares;
};

/// An element's random bits are those of its place in `values`.
void encode_levels(LevelForm form, const float* values, std::size_t numel, NoiseKey key, std::uint32_t* message);

/// Adds what the message has.
void add_levels(LevelForm form, const std::uint32_t* message, std::size_t numel, float* output);

}  // namespace tessera
