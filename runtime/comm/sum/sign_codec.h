#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/message_words.h"

namespace tessera {

/// Gradients as their signs, in runs of kMessageRun elements; the last of a message may be shorter. A message is words of 32 bits:
///
///   scaled  of each run: the mean of its magnitudes (fp32), then a bit for each element: set where it is negative
///   votes   a word that is not 0 where some value was not finite, then of each run the bits alone
///
/// A scaled message of values that are not finite has a scale that is not, either. Loops make the same bits with every instruction set.

/// Writes `values` as a scaled message, and leaves of them what it lacks. `more` [numel] is added to them first, unless null.
void encode_signs(float* values, const float* more, std::size_t numel, std::uint32_t* message);

/// `output[i]` becomes what the message says of it, or is added to it.
void decode_signs(const std::uint32_t* message, std::size_t numel, float* output);
void add_signs(const std::uint32_t* message, std::size_t numel, float* output);

/// Writes what `values` vote: an element whose place plus `turn` is even votes + where it is 0, others -.
void cast_votes(const float* values, std::size_t numel, std::uint64_t turn, std::uint32_t* votes);

/// Counts `voters` messages, one behind the other, of `numel` elements each: a sign has the majority, and where neither has, the one that a
/// zero votes. `result` may not be among them.
void count_votes(const std::uint32_t* votes, std::size_t voters, std::size_t numel, std::uint64_t turn,
                 std::uint32_t* result);

/// `output[i]` becomes `magnitude` with the sign that the message has for it; the first one NaN where values were not finite.
void decode_votes(const std::uint32_t* votes, std::size_t numel, float magnitude, float* output);

}  // namespace tessera
