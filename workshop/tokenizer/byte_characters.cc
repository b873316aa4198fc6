#include "workshop/tokenizer/byte_characters.h"

#include <array>

#include "workshop/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr char32_t kFirstOther = 0x100;
constexpr int kOthers = 68;
constexpr int kNoByte = -1;

constexpr bool is_visible(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/// Makes the table [code point]: its byte.
constexpr std::array<int, kFirstOther + kOthers> make_bytes() {
  std::array<int, kFirstOther + kOthers> bytes{};
  std::size_t other = kFirstOther;
  for (int byte = 0; byte < 256; ++byte) {
    bytes[static_cast<std::size_t>(byte)] = is_visible(byte) ? byte : kNoByte;
    if (!is_visible(byte)) bytes[other++] = byte;
  }
  return bytes;
}
constexpr auto kBytes = make_bytes();

}  // namespace

std::optional<std::string> bytes_of_characters(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const std::size_t length = utf8_length(token);
    const char32_t code = length == 0 ? kFirstOther + kOthers : code_point(token, length);
    if (code >= kBytes.size() || kBytes[code] == kNoByte) return std::nullopt;
    bytes += static_cast<char>(kBytes[code]);
    token.remove_prefix(length);
  }
  return bytes;
}

}  // namespace tessera
