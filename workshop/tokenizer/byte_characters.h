#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// GPT-2's way to write bytes as visible characters, which vocabularies in JSON use ("Ġthe" is " the"). A byte that is
/// visible in Latin-1 is the character of that number, and the other 68 are U+0100 and following, in order.

/// Returns the bytes for which a token's characters stand; nothing if a character stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view token);

}  // namespace tessera
