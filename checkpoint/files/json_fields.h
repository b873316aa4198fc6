#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/json_document.h"

namespace tessera {

/// Reads the members of a JSON object from a file that may be damaged or hostile. If a member is missing, has another
/// type or is out of range, the result is a default, and `status` is set to the error. Only the first error is kept. So
/// the caller reads all members and then checks `status` once.
class JsonFields {
 public:
  /// `file` is the prefix of messages, `place` is the object's JSON pointer. `node`, `file` and `status` must outlive
  /// this object.
  JsonFields(const JsonNode& node, const std::string& file, std::string place, absl::Status& status);

  bool has(std::string_view key) const { return find(key) != nullptr; }
  /// Returns an integer of [least, most], or `least` if the member is wrong.
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most) const;
  double number(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::string text(std::string_view key) const;
  /// Reads a hash as hash_text writes it.
  std::uint64_t hash(std::string_view key) const;
  std::vector<std::int64_t> integers(std::string_view key, std::int64_t least, std::int64_t most) const;
  std::vector<std::string> texts(std::string_view key) const;
  std::vector<std::uint64_t> hashes(std::string_view key) const;
  /// Returns the members of an object or the elements of a list; empty if the value is neither.
  const std::vector<JsonNode>& children(std::string_view key) const;
  const JsonNode* find(std::string_view key) const;
  std::string place_of(std::string_view key) const;

  /// Sets the error that a member is wrong. `what` says what is wrong.
  void refuse(std::string_view key, const std::string& what) const;

 private:
  template <class Read>
  void read_list(std::string_view key, const Read& read) const;

  const JsonNode& node_;
  const std::string& file_;
  std::string place_;
  absl::Status& status_;
};

/// Reads an integer of [least, most]. Returns false if the value is not such an integer; 1.0 is not one.
bool read_integer(const nlohmann::json& value, std::int64_t least, std::int64_t most, std::int64_t& integer);

/// Parses a text of at most `most_values` values, strictly (runtime/config/json_document.h). It fails with error 65 if
/// the text is not such JSON.
absl::StatusOr<JsonNode> parse_checkpoint_json(const std::string& file, std::string_view text, std::size_t most_values);

}  // namespace tessera
