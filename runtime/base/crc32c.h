#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// The CRC-32C (Castagnoli, RFC 3720) of `bytes`. A byte at a time: for records of some hundred bytes.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
