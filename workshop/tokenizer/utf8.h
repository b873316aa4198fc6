#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the number of bytes of the UTF-8 character that begins at text[0]. It is 0 if no character begins there. The
/// text is not empty. Overlong forms, surrogates and code points above U+10FFFF are no characters.
std::size_t utf8_length(std::string_view text);

/// Returns `text` itself if it is UTF-8. Otherwise returns a copy in `buffer`. In this copy, U+FFFD replaces each byte
/// that begins no character, and each begun character that is not complete. Python's `bytes.decode("utf-8", "replace")`
/// and Rust's `from_utf8_lossy` do the same. `replaced` gets the number of replacements.
std::string_view valid_utf8(std::string_view text, std::string& buffer, std::size_t& replaced);

/// Appends a code point.
void append_utf8(char32_t code, std::string& text);
/// Returns the code point of text[0, length). REQUIRES: utf8_length(text) is `length`.
char32_t code_point(std::string_view text, std::size_t length);

/// GPT-2 writes bytes as visible characters, and vocabularies in JSON contain these characters ("Ġthe" is " the"). A
/// byte that is visible in Latin-1 is written as the character of that number. The other 68 bytes are written as U+0100
/// to U+0143, in order.

/// Returns the bytes for which a token's characters stand; nothing if a character stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view token);

}  // namespace tessera
