#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/process/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera {

/// The members of one JSON object in a file of measurements. One call reads one key, and every key must be there. A
/// mistake is added to Diagnostics with the file, the line, the key, the wanted and the actual value; the call then
/// returns a default value. So code reads all its keys, calls `finish` to report keys that were not read, and checks
/// the Diagnostics once.
class MeasuredFields {
 public:
  /// The largest number of seconds, or of seconds per byte. A larger number is a mistake, and smaller numbers can be
  /// summed without an overflow.
  static constexpr double kMost = 1e9;

  /// REQUIRES: `node` is an object. `node` and `diagnostics` must outlive this object. `place`: the JSON pointer of the
  /// object.
  MeasuredFields(const JsonNode& node, std::string place, Diagnostics& diagnostics)
      : node_(node), place_(std::move(place)), diagnostics_(diagnostics) {}

  /// Returns a number from 0 to kMost; JSON has no infinities.
  double number(std::string_view key);
  /// Returns an integer of [least, most].
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most);
  bool boolean(std::string_view key);
  /// Returns a text that is not empty.
  std::string text(std::string_view key);
  /// Returns one of `allowed`, or "" if the value is none of them.
  std::string word(std::string_view key, const std::vector<std::string>& allowed);
  /// Returns the fields of an object, or nothing if the value is no object.
  std::optional<MeasuredFields> object(std::string_view key);
  /// Returns the elements of a list, or null if the value is no list.
  const JsonNode* list(std::string_view key);

  /// Reports a mistake in a member. `message` describes the mistake.
  void wrong(std::string_view key, const std::string& message);
  /// Reports keys that were not read.
  void finish();

 private:
  const JsonNode* find(std::string_view key) const;
  const JsonNode* needed(std::string_view key);
  void refuse(std::string_view key, const std::string& wanted, const JsonNode& got);

  const JsonNode& node_;
  const std::string place_;
  Diagnostics& diagnostics_;
  std::vector<std::string> known_;
};

/// Reads `text` as a JSON object of at most `most_values` values. If the text is not such an object, the function
/// returns nothing, and adds the mistake to `diagnostics`.
std::optional<JsonNode> parse_measurements(std::string_view text, Diagnostics& diagnostics, std::size_t most_values);

/// Returns OK if `diagnostics` are empty, or else all of them as the error for a file with wrong content (65). `hint`:
/// text that names the command which writes such files.
absl::Status status_of(const Diagnostics& diagnostics, const std::string& hint);

}  // namespace tessera
