#include "workshop/tokenizer/utf8.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::uint8_t byte_at(std::string_view text, std::size_t i) { return static_cast<std::uint8_t>(text[i]); }

/// The character that begins at text[0]. It has the number of bytes that the character should have, and the number of
/// bytes that are there and valid (Unicode 15, table 3-7).
struct Begun {
  std::size_t wanted = 0;
  std::size_t right = 0;
};

Begun look_at(std::string_view text) {
  const std::uint8_t lead = byte_at(text, 0);
  if (lead < 0x80) return {1, 1};
  if (lead < 0xC2 || lead > 0xF4) return {0, 1};
  Begun begun{lead < 0xE0 ? 2u : lead < 0xF0 ? 3u : 4u, 1};
  std::uint8_t least = 0x80, most = 0xBF;  // bounds of the second byte
  if (lead == 0xE0) least = 0xA0;
  if (lead == 0xED) most = 0x9F;
  if (lead == 0xF0) least = 0x90;
  if (lead == 0xF4) most = 0x8F;
  for (; begun.right < begun.wanted && begun.right < text.size(); ++begun.right) {
    const std::uint8_t next = byte_at(text, begun.right);
    if (next < least || next > most) break;
    least = 0x80;
    most = 0xBF;
  }
  return begun;
}

/// Returns the length of the valid UTF-8 at the beginning of the text.
std::size_t valid_prefix(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    std::uint64_t eight = 0;
    if (text.size() - i >= sizeof eight) {
      std::memcpy(&eight, text.data() + i, sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof eight;
        continue;
      }
    }
    const std::size_t length = utf8_length(text.substr(i, 4));
    if (length == 0) break;
    i += length;
  }
  return i;
}

}  // namespace

std::size_t utf8_length(std::string_view text) {
  const Begun begun = look_at(text);
  return begun.right == begun.wanted ? begun.wanted : 0;
}

std::string_view valid_utf8(std::string_view text, std::string& buffer, std::size_t& replaced) {
  replaced = 0;
  std::size_t valid = valid_prefix(text);
  if (valid == text.size()) return text;
  buffer.clear();
  while (!text.empty()) {
    buffer.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    buffer.append(kReplacement);
    ++replaced;
    text.remove_prefix(look_at(text).right);
    valid = valid_prefix(text);
  }
  return buffer;
}

void append_utf8(char32_t code, std::string& text) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

char32_t code_point(std::string_view text, std::size_t length) {
  constexpr std::uint8_t kLeadBits[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  char32_t code = byte_at(text, 0) & kLeadBits[length];
  for (std::size_t i = 1; i < length; ++i) code = code << 6 | (byte_at(text, i) & 0x3F);
  return code;
}

namespace {

constexpr char32_t kFirstOther = 0x100;
constexpr int kOthers = 68;
constexpr int kNoByte = -1;

constexpr bool is_visible(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/// Makes a table that has, for each code point, the byte for which it stands, or kNoByte if it stands for no byte.
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
