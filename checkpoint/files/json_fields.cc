#include "checkpoint/files/json_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/hash.h"
#include "runtime/base/status.h"

namespace tessera {

bool read_integer(const nlohmann::json& value, std::int64_t least, std::int64_t most, std::int64_t& integer) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) return false;
  const auto got = value.get<std::int64_t>();
  if (got < least || got > most) return false;
  integer = got;
  return true;
}

absl::StatusOr<JsonNode> parse_checkpoint_json(const std::string& file, std::string_view text,
                                               std::size_t most_values) {
  Diagnostics diagnostics(file, text);
  std::optional<JsonNode> root = parse_json(text, diagnostics, most_values);
  if (!diagnostics.empty()) return make_error(ExitCode::kCorruptData, message_of(diagnostics.to_status()));
  if (!root || !root->is_object())
    return make_error(ExitCode::kCorruptData, file + ": wanted a JSON object, got " +
                                                  (root ? describe(*root) : std::string("something else")) +
                                                  kDamagedFileHint);
  return *std::move(root);
}

JsonFields::JsonFields(const JsonNode& node, const std::string& file, std::string place, absl::Status& status)
    : node_(node), file_(file), place_(std::move(place)), status_(status) {
  if (!node_.is_object() && status_.ok())
    status_ = make_error(ExitCode::kCorruptData, fmt::format("{}: {}: wanted an object, got {}{}", file_, place_,
                                                             describe(node_), kDamagedFileHint));
}

std::string JsonFields::place_of(std::string_view key) const { return json_pointer(place_, key); }

const JsonNode* JsonFields::find(std::string_view key) const {
  if (!node_.is_object()) return nullptr;
  const auto found = std::ranges::find(node_.children, key, &JsonNode::key);
  return found == node_.children.end() ? nullptr : &*found;
}

void JsonFields::refuse(std::string_view key, const std::string& what) const {
  if (!status_.ok()) return;
  const JsonNode* const node = find(key);
  status_ = make_error(ExitCode::kCorruptData, fmt::format("{}: {}: {}, got {}{}", file_, place_of(key), what,
                                                           node ? describe(*node) : "nothing", kDamagedFileHint));
}

std::int64_t JsonFields::integer(std::string_view key, std::int64_t least, std::int64_t most) const {
  const JsonNode* const node = find(key);
  std::int64_t value = least;
  if (!node || !read_integer(node->value, least, most, value))
    refuse(key, fmt::format("wanted an integer from {} to {}", least, most));
  return value;
}

double JsonFields::number(std::string_view key) const {
  const JsonNode* const node = find(key);
  if (node && node->value.is_number()) return node->value.get<double>();
  refuse(key, "wanted a number");
  return 0;
}

bool JsonFields::boolean(std::string_view key) const {
  const JsonNode* const node = find(key);
  if (node && node->value.is_boolean()) return node->value.get<bool>();
  refuse(key, "wanted true or false");
  return false;
}

std::string JsonFields::text(std::string_view key) const {
  const JsonNode* const node = find(key);
  if (node && node->value.is_string()) return node->value.get<std::string>();
  refuse(key, "wanted a string");
  return "";
}

std::uint64_t JsonFields::hash(std::string_view key) const {
  std::uint64_t hash = 0;
  if (!read_hash(text(key), hash)) refuse(key, "wanted a hash of 16 hexadecimal digits");
  return hash;
}

template <class Read>
void JsonFields::read_list(std::string_view key, const Read& read) const {
  const JsonNode* const node = find(key);
  if (!node || !node->is_list()) return refuse(key, "wanted a list");
  for (const JsonNode& child : node->children) {
    if (!read(child.value)) return refuse(key, "an element of the list is not what it should be: " + describe(child));
  }
}

std::vector<std::int64_t> JsonFields::integers(std::string_view key, std::int64_t least, std::int64_t most) const {
  std::vector<std::int64_t> values;
  read_list(key, [&](const nlohmann::json& value) { return read_integer(value, least, most, values.emplace_back()); });
  return values;
}

std::vector<std::string> JsonFields::texts(std::string_view key) const {
  std::vector<std::string> values;
  read_list(key, [&](const nlohmann::json& value) {
    if (value.is_string()) values.push_back(value.get<std::string>());
    return value.is_string();
  });
  return values;
}

std::vector<std::uint64_t> JsonFields::hashes(std::string_view key) const {
  std::vector<std::uint64_t> values;
  read_list(key, [&](const nlohmann::json& value) {
    return value.is_string() && read_hash(value.get_ref<const std::string&>(), values.emplace_back());
  });
  return values;
}

const std::vector<JsonNode>& JsonFields::children(std::string_view key) const {
  static const std::vector<JsonNode> kNone;
  const JsonNode* const node = find(key);
  if (node && (node->is_object() || node->is_list())) return node->children;
  refuse(key, "wanted a list or an object");
  return kNone;
}

}  // namespace tessera
