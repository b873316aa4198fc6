#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/process/diagnostics.h"

namespace tessera {

/// A value of a JSON text, with its position. nlohmann's own tree keeps neither positions nor keys that are given
/// twice, and messages need both.
struct JsonNode {
  std::string key;             ///< key of a member of an object; else empty
  std::size_t key_offset = 0;  ///< bytes from the start of the text to the key's opening quote
  std::size_t offset = 0;      ///< bytes from the start of the text to the value's first byte
  nlohmann::json value;        ///< a scalar; for an object or a list, an empty value of that type
  std::vector<JsonNode> children;

  bool is_object() const { return value.is_object(); }
  bool is_list() const { return value.is_array(); }
};

/// Reads RFC 8259 JSON, strictly: no comments, no trailing commas, no NaN, no number that a double cannot hold, valid
/// UTF-8 (a byte order mark is skipped), nothing after the value, and lists and objects nested at most kMaxJsonDepth
/// deep. The text is read up to its first violation of these rules. This violation, and every key that was given twice
/// in one object up to there, is reported to `diagnostics`. The result is empty if the text could not be read to its
/// end. Deeper nesting does not use more stack. A text of more than `most_values` values (about 200 bytes of memory
/// each) is not read to its end either.
std::optional<JsonNode> parse_json(std::string_view text, Diagnostics& diagnostics,
                                   std::size_t most_values = static_cast<std::size_t>(-1));

/// Deepest nesting that parse_json reads.
inline constexpr std::size_t kMaxJsonDepth = 32;

/// Returns `pointer` + "/" + `key`. The key is escaped as RFC 6901 says, and cut if it is very long.
std::string json_pointer(const std::string& pointer, std::string_view key);

/// Returns the text with which messages name the value: "the string \"fast\"", "0.5", "true", "a list of 3", ...
std::string describe(const JsonNode& node);

}  // namespace tessera
