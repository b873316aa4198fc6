#include "runtime/comm/sum/lossless.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "runtime/comm/sum/cpu_clones.h"

// The lossless codec. `pack` writes each whole block of 256 elements as one of four kinds. It splits the elements into
// exponents, high and low halves (`split`), chooses the base exponent (`base_of`), and writes a 3-bit code for each
// element. Exponents that a code cannot express follow in full. `unpack` reverses `pack` and checks every length
// against the bytes that are left, so a damaged message is refused. If the last elements of a message are no whole
// block, they are copied. The loops over a block have constant length, so that they vectorise.

namespace tessera {
namespace {

constexpr std::size_t kBlock = kLosslessBlock;

/// The first byte of a block.
enum Kind : std::uint8_t {
  kZeros,   ///< nothing follows: all bits are 0
  kCopied,  ///< the elements unchanged
  kPacked,  ///< head (kHeadBytes), codes, signs and mantissas; the low halves of fp32; exponents written in full
  kNarrow,  ///< fp32 only: like kPacked, but all low halves are 0 and left out
};

constexpr std::size_t kCodeBits = 3, kEscape = 7;
constexpr std::size_t kCodeWords = 32;  ///< each word holds the codes of 8 elements that lie kCodeWords apart
constexpr std::size_t kCodeBytes = kBlock * kCodeBits / 8;
static_assert(kCodeWords * 8 == kBlock && kCodeBytes == 3 * kCodeWords);
/// Bytes of a packed block's parts, without the codes: the head (kind, base exponent, number of exponents in full), the
/// high parts (Split), and the low halves of fp32.
constexpr std::size_t kHeadBytes = 3, kHighBytes = kBlock, kLowBytes = 2 * kBlock;
constexpr std::size_t kNarrowBytes = kHeadBytes + kCodeBytes + kHighBytes;

/// A block whose exponents are separated: `high` is the sign and the upper 7 bits of the mantissa.
struct Split {
  alignas(64) std::array<std::uint16_t, kBlock> low;  ///< fp32 only
  alignas(64) std::array<std::uint8_t, kBlock> high;
  alignas(64) std::array<std::uint8_t, kBlock> exponents;
};

struct Found {
  std::uint32_t any = 0, any_low = 0;  ///< the bits of all elements, joined by "or"
};

TESSERA_INLINE Found split(const std::uint32_t* bits, Split& parts) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::uint32_t value = bits[i];
    any |= value;
    parts.low[i] = static_cast<std::uint16_t>(value);
    parts.high[i] = static_cast<std::uint8_t>(((value >> 16) & 0x7f) | ((value >> 24) & 0x80));
    parts.exponents[i] = static_cast<std::uint8_t>(value >> 23);
  }
  return {any, any & 0xffff};
}

TESSERA_INLINE Found split(const std::uint16_t* bits, Split& parts) {
  std::uint16_t any = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::uint16_t value = bits[i];
    any = static_cast<std::uint16_t>(any | value);
    parts.high[i] = static_cast<std::uint8_t>((value & 0x7f) | ((value >> 8) & 0x80));
    parts.exponents[i] = static_cast<std::uint8_t>(value >> 7);
  }
  return {any, 0};
}

/// Returns the base exponent of a block. Codes can express the base and the six exponents below it. The function tries
/// the block's highest exponent and the three exponents below it, and returns the one that covers most elements. The
/// base is not always the highest exponent, since one outlier would then force all other exponents to be written in
/// full.
TESSERA_INLINE std::uint8_t base_of(const std::array<std::uint8_t, kBlock>& exponents) {
  std::uint8_t highest = 0;
  for (const std::uint8_t exponent : exponents) highest = std::max(highest, exponent);
  std::uint8_t best = highest;
  std::uint16_t most = 0;
  for (std::uint8_t below = 0; below < 4; ++below) {
    const auto base = static_cast<std::uint8_t>(highest - below);
    std::uint16_t count = 0;
    for (const std::uint8_t exponent : exponents)
      count = static_cast<std::uint16_t>(count + (static_cast<std::uint8_t>(base - exponent) < kEscape ? 1 : 0));
    if (count > most) most = count, best = base;
  }
  return best;
}

/// Calls `found(i)` for each element whose code is kEscape, in order, until `found` returns false.
template <class Found>
TESSERA_INLINE bool for_each_escape(const std::array<std::uint8_t, kBlock>& codes, const Found& found) {
  for (std::size_t first = 0; first < kBlock; first += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, codes.data() + first, 8);
    std::uint64_t escapes = (eight + 0x0101010101010101u) & 0x0808080808080808u;
    for (; escapes != 0; escapes &= escapes - 1) {
      if (!found(first + static_cast<std::size_t>(__builtin_ctzll(escapes)) / 8)) return false;
    }
  }
  return true;
}

TESSERA_INLINE void write_codes(const std::array<std::uint8_t, kBlock>& codes, std::byte* to) {
  std::array<std::uint16_t, kCodeWords> words;
  std::array<std::uint8_t, kCodeWords> tops;
  for (std::size_t i = 0; i < kCodeWords; ++i) {
    std::uint32_t word = 0;
    for (std::size_t k = 0; k < 8; ++k)
      word |= static_cast<std::uint32_t>(codes[i + k * kCodeWords]) << (kCodeBits * k);
    words[i] = static_cast<std::uint16_t>(word);
    tops[i] = static_cast<std::uint8_t>(word >> 16);
  }
  std::memcpy(to, words.data(), sizeof words);
  std::memcpy(to + sizeof words, tops.data(), sizeof tops);
}

TESSERA_INLINE void read_codes(const std::byte* from, std::array<std::uint8_t, kBlock>& codes) {
  std::array<std::uint16_t, kCodeWords> words;
  std::array<std::uint8_t, kCodeWords> tops;
  std::memcpy(words.data(), from, sizeof words);
  std::memcpy(tops.data(), from + sizeof words, sizeof tops);
  for (std::size_t i = 0; i < kCodeWords; ++i) {
    const std::uint32_t word = words[i] | static_cast<std::uint32_t>(tops[i]) << 16;
    for (std::size_t k = 0; k < 8; ++k)
      codes[i + k * kCodeWords] = static_cast<std::uint8_t>((word >> (kCodeBits * k)) & kEscape);
  }
}

TESSERA_INLINE std::byte* copy_block(const void* block, std::size_t bytes, std::byte* to) {
  *to = std::byte{kCopied};
  std::memcpy(to + 1, block, bytes);
  return to + 1 + bytes;
}

/// Writes a whole block, and returns its end.
template <class Bits>
TESSERA_INLINE std::byte* pack_bits(const Bits* block, std::byte* to) {
  Split parts;
  const Found found = split(block, parts);
  if (found.any == 0) {
    *to = std::byte{kZeros};
    return to + 1;
  }
  const std::uint8_t base = base_of(parts.exponents);
  alignas(64) std::array<std::uint8_t, kBlock> codes;
  for (std::size_t i = 0; i < kBlock; ++i)
    codes[i] = std::min(static_cast<std::uint8_t>(base - parts.exponents[i]), static_cast<std::uint8_t>(kEscape));
  const bool has_low = sizeof(Bits) == 4 && found.any_low != 0;
  const std::size_t most_escapes = sizeof(Bits) * kBlock - kNarrowBytes - (has_low ? kLowBytes : 0);
  std::array<std::uint8_t, kBlock> escapes;
  std::size_t count = 0;
  for_each_escape(codes, [&](std::size_t i) {
    escapes[count++] = parts.exponents[i];
    return true;
  });
  if (count > std::min<std::size_t>(most_escapes, 255)) return copy_block(block, sizeof(Bits) * kBlock, to);
  const bool is_narrow = sizeof(Bits) == 4 && !has_low;
  to[0] = static_cast<std::byte>(is_narrow ? kNarrow : kPacked);
  to[1] = static_cast<std::byte>(base);
  to[2] = static_cast<std::byte>(count);
  to += kHeadBytes;
  write_codes(codes, to);
  std::memcpy(to + kCodeBytes, parts.high.data(), kHighBytes);
  to += kCodeBytes + kHighBytes;
  if (has_low) {
    std::memcpy(to, parts.low.data(), kLowBytes);
    to += kLowBytes;
  }
  std::memcpy(to, escapes.data(), count);
  return to + count;
}

TESSERA_INLINE void join(const Split& parts, std::uint32_t* bits) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::uint32_t high = parts.high[i];
    bits[i] =
        (high & 0x80) << 24 | static_cast<std::uint32_t>(parts.exponents[i]) << 23 | (high & 0x7f) << 16 | parts.low[i];
  }
}

TESSERA_INLINE void join(const Split& parts, std::uint16_t* bits) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    const unsigned high = parts.high[i];
    bits[i] =
        static_cast<std::uint16_t>((high & 0x80) << 8 | static_cast<unsigned>(parts.exponents[i]) << 7 | (high & 0x7f));
  }
}

/// Reads a whole block of kind kPacked or kNarrow, from at most `left` bytes. Returns the block's length in bytes; 0 if
/// the bytes are no such block.
template <class Bits>
TESSERA_INLINE std::size_t unpack_bits(const std::byte* from, std::size_t left, Bits* block) {
  const bool has_low = sizeof(Bits) == 4 && from[0] == std::byte{kPacked};
  const std::size_t fixed = kNarrowBytes + (has_low ? kLowBytes : 0);
  if (left < fixed) return 0;
  const auto base = static_cast<std::uint8_t>(from[1]);
  const auto count = static_cast<std::size_t>(from[2]);
  if (left - fixed < count) return 0;
  alignas(64) std::array<std::uint8_t, kBlock> codes;
  Split parts;
  read_codes(from + kHeadBytes, codes);
  for (std::size_t i = 0; i < kBlock; ++i) parts.exponents[i] = static_cast<std::uint8_t>(base - codes[i]);
  const std::byte* next = from + fixed;
  const std::byte* const end = next + count;
  const bool has_all = for_each_escape(codes, [&](std::size_t i) {
    if (next == end) return false;
    parts.exponents[i] = static_cast<std::uint8_t>(*next++);
    return true;
  });
  if (!has_all || next != end) return 0;
  std::memcpy(parts.high.data(), from + kHeadBytes + kCodeBytes, kHighBytes);
  if (has_low) {
    std::memcpy(parts.low.data(), from + kNarrowBytes, kLowBytes);
  } else {
    parts.low.fill(0);
  }
  join(parts, block);
  return fixed + count;
}

TESSERA_CPU_CLONES std::byte* pack_block(const std::uint32_t* block, std::byte* to) { return pack_bits(block, to); }
TESSERA_CPU_CLONES std::byte* pack_block(const std::uint16_t* block, std::byte* to) { return pack_bits(block, to); }

TESSERA_CPU_CLONES std::size_t unpack_block(const std::byte* from, std::size_t left, std::uint32_t* block) {
  return unpack_bits(from, left, block);
}
TESSERA_CPU_CLONES std::size_t unpack_block(const std::byte* from, std::size_t left, std::uint16_t* block) {
  return unpack_bits(from, left, block);
}

template <class Bits>
std::size_t pack_all(const Bits* input, std::size_t numel, std::byte* packed) {
  std::byte* to = packed;
  std::size_t i = 0;
  for (; i + kBlock <= numel; i += kBlock) to = pack_block(input + i, to);
  if (i < numel) to = copy_block(input + i, (numel - i) * sizeof(Bits), to);
  return static_cast<std::size_t>(to - packed);
}

template <class Bits>
bool unpack_all(std::span<const std::byte> packed, Bits* output, std::size_t numel) {
  for (std::size_t i = 0; i < numel; i += kBlock) {
    if (packed.empty()) return false;
    const std::size_t count = std::min(kBlock, numel - i), bytes = count * sizeof(Bits);
    const auto kind = static_cast<std::uint8_t>(packed[0]);
    std::size_t read = 0;
    if (kind == kCopied && packed.size() > bytes) {
      std::memcpy(output + i, packed.data() + 1, bytes);
      read = 1 + bytes;
    } else if (count == kBlock && kind == kZeros) {
      std::memset(output + i, 0, bytes);
      read = 1;
    } else if (count == kBlock && (kind == kPacked || (kind == kNarrow && sizeof(Bits) == 4))) {
      read = unpack_block(packed.data(), packed.size(), output + i);
    }
    if (read == 0) return false;
    packed = packed.subspan(read);
  }
  return packed.empty();
}

}  // namespace

bool can_pack(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

std::size_t most_packed_bytes(DType dtype, std::size_t numel) {
  return numel * size_of(dtype) + (numel + kBlock - 1) / kBlock;
}

std::size_t pack(DType dtype, const void* input, std::size_t numel, std::byte* packed) {
  if (dtype == DType::kBF16) return pack_all(static_cast<const std::uint16_t*>(input), numel, packed);
  return pack_all(static_cast<const std::uint32_t*>(input), numel, packed);
}

bool unpack(DType dtype, std::span<const std::byte> packed, void* output, std::size_t numel) {
  if (dtype == DType::kBF16) return unpack_all(packed, static_cast<std::uint16_t*>(output), numel);
  return unpack_all(packed, static_cast<std::uint32_t*>(output), numel);
}

}  // namespace tessera
