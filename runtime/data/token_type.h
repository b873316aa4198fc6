#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>

namespace tessera {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read in place");

/// The integer type of a token in a file.
enum class TokenType : std::uint8_t { kU8, kI8, kI16, kU16, kI32, kU32, kI64 };

/// Returns the number of bytes of a token.
constexpr std::int64_t size_of(TokenType type) {
  switch (type) {
    case TokenType::kU8:
    case TokenType::kI8:
      return 1;
    case TokenType::kI16:
    case TokenType::kU16:
      return 2;
    case TokenType::kI32:
    case TokenType::kU32:
      return 4;
    case TokenType::kI64:
      return 8;
  }
  return 0;
}

/// Returns the name as messages show it: "uint16".
constexpr std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return "uint8";
    case TokenType::kI8:
      return "int8";
    case TokenType::kI16:
      return "int16";
    case TokenType::kU16:
      return "uint16";
    case TokenType::kI32:
      return "int32";
    case TokenType::kU32:
      return "uint32";
    case TokenType::kI64:
      return "int64";
  }
  return "?";
}

/// Calls `body` with a zero of the C++ type for `type`.
template <typename Body>
auto with_token_type(TokenType type, Body&& body) {
  switch (type) {
    case TokenType::kU8:
      return body(std::uint8_t{});
    case TokenType::kI8:
      return body(std::int8_t{});
    case TokenType::kI16:
      return body(std::int16_t{});
    case TokenType::kU16:
      return body(std::uint16_t{});
    case TokenType::kI32:
      return body(std::int32_t{});
    case TokenType::kU32:
      return body(std::uint32_t{});
    case TokenType::kI64:
      break;
  }
  return body(std::int64_t{});
}

/// Returns whether `token` can be written as `type`.
inline bool fits(TokenType type, std::int64_t token) {
  return with_token_type(type, [&](auto zero) {
    using Limits = std::numeric_limits<decltype(zero)>;
    return token >= static_cast<std::int64_t>(Limits::min()) && token <= static_cast<std::int64_t>(Limits::max());
  });
}

/// Returns the little-endian value at an address, aligned or not.
template <typename T>
T load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

/// Sets `out[i]` to token i of the array that starts at `first`.
inline void widen(TokenType type, const std::byte* first, std::span<std::int64_t> out) {
  with_token_type(type, [&](auto zero) {
    using Token = decltype(zero);
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<std::int64_t>(load<Token>(first + i * sizeof(Token)));
    return 0;
  });
}

}  // namespace tessera
