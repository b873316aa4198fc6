#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/message_words.h"

namespace tessera {

/// A codec that writes gradients as their signs, in runs of kMessageRun elements. The last run of a message may be
/// shorter. A message is words of 32 bits, in one of two forms:
///
///    scaled  for each run: the mean of its magnitudes (fp32), then one bit per element, set if it is negative
///    votes   one word that is not 0 if some value was not finite, then only the bits of each run
///
/// A scaled message of values that are not finite has a scale that is not finite. The loops make the same bits with
/// every instruction set.

/// Adds `more` [numel], unless it is null, to `values`. Then writes `values` as a scaled message, and subtracts the
/// message's values from `values`.
void encode_signs(float* values, const float* more, std::size_t numel, std::uint32_t* message);

/// decode_signs sets `output` [numel] to the message's values.
/// add_signs adds the message's values to `output`.
void decode_signs(const std::uint32_t* message, std::size_t numel, float* output);
void add_signs(const std::uint32_t* message, std::size_t numel, float* output);

/// Writes the votes of `values`. A zero votes plus if its index plus `turn` (the step's number) is even, and minus
/// otherwise.
void cast_votes(const float* values, std::size_t numel, std::uint64_t turn, std::uint32_t* votes);

/// Counts the votes of `voters` messages of `numel` elements each, which lie one after the other. The sign with the
/// majority wins. A tie gets the sign that a zero votes for. `result` must not overlap the messages.
void count_votes(const std::uint32_t* votes, std::size_t voters, std::size_t numel, std::uint64_t turn,
                 std::uint32_t* result);

/// Sets `output[i]` to `magnitude` with the message's sign. The first element becomes NaN if some encoded value was not
/// finite.
void decode_votes(const std::uint32_t* votes, std::size_t numel, float magnitude, float* output);

}  // namespace tessera
