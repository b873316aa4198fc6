#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/always_inline.h"

namespace tessera {

// This header has the arithmetic of messages of signs. Loops on the host (runtime/comm/sum/sign_codec.h) and kernels of
// a GPU (optim/cuda/device_signs.h) use this code, so both give the same bits. A word has the signs of 32 elements. Its
// lowest bit is the sign of the first element.

/// Returns the votes of 32 elements of value 0: minus for elements at odd places if `turn`, the step's number, is even.
TESSERA_ALWAYS_INLINE std::uint32_t votes_of_zeros(std::uint64_t turn) {
  constexpr std::uint32_t kOddBits = 0xaaaaaaaau;
  return turn % 2 == 0 ? kOddBits : ~kOddBits;
}

/// Returns the votes of 32 elements. `negative` has a bit for each element with a minus sign, and `zero` has a bit for
/// each element of value 0.
TESSERA_ALWAYS_INLINE std::uint32_t vote_word(std::uint32_t negative, std::uint32_t zero, std::uint32_t of_zeros) {
  return (negative & ~zero) | (of_zeros & zero);
}

/// Returns `magnitude` with the sign that `word` has for its element `place`.
TESSERA_ALWAYS_INLINE float with_sign(float magnitude, std::uint32_t word, std::size_t place) {
  constexpr std::uint32_t kSignBit = 0x80000000u;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) ^ (word << (31 - place) & kSignBit));
}

/// Messages of signs that a GPU makes of fp32 values: one message for each part of the values. If a message has fewer
/// elements than the others, zeros follow its words.
struct SignMessages {
  enum class Kind {
    kVotes,   ///< as cast_votes writes them
    kScaled,  ///< as encode_signs writes them; it also changes `kept`
  };
  Kind kind = Kind::kVotes;
  std::size_t numel = 0;  ///< number of all values
  std::size_t parts = 1;
  std::size_t part_numel = 0;  ///< number of values of a part: whole runs, if there are several parts
  std::size_t part_words = 0;  ///< number of words from the beginning of a message to that of the next one
  std::uint64_t turn = 0;      ///< kVotes: the step's number
  float* kept = nullptr;       ///< kScaled: [numel], the residuals of earlier messages

  std::size_t bytes() const { return parts * part_words * sizeof(std::uint32_t); }
};

}  // namespace tessera
