#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

/// Reads a number whose lowest byte comes first, as zip archives, pickles and safetensors write it. REQUIRES: `bytes`
/// has at most 8 bytes.
inline std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t number = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) number = number << 8 | static_cast<unsigned char>(bytes[i]);
  return number;
}

}  // namespace tessera
