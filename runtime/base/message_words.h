#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "runtime/base/always_inline.h"

namespace tessera {

/// Lengths of compressed gradients, in words of 32 bits for `numel` elements. Codecs (runtime/comm/sum) write such
/// messages, and plans count their bytes.

/// The number of elements in a run. Signs and levels are computed run by run, from the first element on. The last run
/// of a message may be shorter.
inline constexpr std::size_t kMessageRun = 256;

/// Returns the number of runs in a message of `numel` elements.
template <std::integral Count>
TESSERA_ALWAYS_INLINE constexpr Count message_runs(Count numel) {
  constexpr auto run = static_cast<Count>(kMessageRun);
  return (numel + run - 1) / run;
}

/// Returns the number of words of a message with one scale for each run and one bit for each element.
template <std::integral Count>
constexpr Count scaled_sign_words(Count numel) {
  return message_runs(numel) * static_cast<Count>(1 + kMessageRun / 32);
}

/// Returns the number of words of a message with one word for the whole message and one bit for each element, padded to
/// whole runs.
template <std::integral Count>
constexpr Count vote_words(Count numel) {
  return 1 + message_runs(numel) * static_cast<Count>(kMessageRun / 32);
}

/// Returns the number of bits of a code from -levels to levels: 2, 4 or 8.
constexpr std::size_t level_bits(std::int64_t levels) { return levels == 1 ? 2 : levels <= 7 ? 4 : 8; }

/// Returns the number of words of a message with one norm for each run and one code for each element.
template <std::integral Count>
constexpr Count level_words(std::int64_t levels, Count numel) {
  return message_runs(numel) * static_cast<Count>(1 + kMessageRun * level_bits(levels) / 32);
}

}  // namespace tessera
