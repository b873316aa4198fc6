#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// Returns the CRC-32C (Castagnoli, RFC 3720) of `bytes`. It works a byte at a time, which is fast enough for records
/// of some hundred bytes. Any thread may call it.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
