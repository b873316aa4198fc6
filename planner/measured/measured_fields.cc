#include "planner/measured/measured_fields.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {

const JsonNode* MeasuredFields::find(std::string_view key) const {
  const auto found = std::ranges::find(node_.children, key, &JsonNode::key);
  return found == node_.children.end() ? nullptr : &*found;
}

const JsonNode* MeasuredFields::needed(std::string_view key) {
  known_.emplace_back(key);
  const JsonNode* const node = find(key);
  if (!node) diagnostics_.add(node_.offset, json_pointer(place_, key), "is needed, but not there");
  return node;
}

void MeasuredFields::wrong(std::string_view key, const std::string& message) {
  const JsonNode* const node = find(key);
  diagnostics_.add(node ? node->offset : node_.offset, json_pointer(place_, key), message);
}

void MeasuredFields::refuse(std::string_view key, const std::string& wanted, const JsonNode& got) {
  wrong(key, fmt::format("must be {}, got {}", wanted, describe(got)));
}

double MeasuredFields::number(std::string_view key) {
  const JsonNode* const node = needed(key);
  if (!node) return 0;
  const double value = node->value.is_number() ? node->value.get<double>() : -1.0;
  if (value >= 0 && value <= kMost) return value;
  refuse(key, fmt::format("a number from 0 to {:g}", kMost), *node);
  return 0;
}

std::int64_t MeasuredFields::integer(std::string_view key, std::int64_t least, std::int64_t most) {
  const JsonNode* const node = needed(key);
  if (!node) return least;
  // Values above 2^63 - 1 are unsigned in nlohmann's tree, and are out of range here.
  const bool fits = node->value.is_number_integer() &&
                    (!node->value.is_number_unsigned() || node->value.get<std::uint64_t>() <= INT64_MAX);
  const std::int64_t value = fits ? node->value.get<std::int64_t>() : least;
  if (fits && value >= least && value <= most) return value;
  refuse(key, fmt::format("an integer from {} to {}", least, most), *node);
  return least;
}

bool MeasuredFields::boolean(std::string_view key) {
  const JsonNode* const node = needed(key);
  if (!node) return false;
  if (node->value.is_boolean()) return node->value.get<bool>();
  refuse(key, "true or false", *node);
  return false;
}

std::string MeasuredFields::text(std::string_view key) {
  const JsonNode* const node = needed(key);
  if (!node) return "";
  if (node->value.is_string() && !node->value.get_ref<const std::string&>().empty())
    return node->value.get<std::string>();
  refuse(key, "a string that is not empty", *node);
  return "";
}

std::string MeasuredFields::word(std::string_view key, const std::vector<std::string>& allowed) {
  const JsonNode* const node = needed(key);
  if (!node) return "";
  const std::string given = node->value.is_string() ? node->value.get<std::string>() : "";
  if (std::ranges::find(allowed, given) != allowed.end()) return given;
  wrong(key,
        fmt::format("must be one of {}, got {}{}", joined(allowed), describe(*node), did_you_mean(given, allowed)));
  return "";
}

std::optional<MeasuredFields> MeasuredFields::object(std::string_view key) {
  const JsonNode* const node = needed(key);
  if (!node) return std::nullopt;
  if (node->is_object()) return MeasuredFields(*node, json_pointer(place_, key), diagnostics_);
  refuse(key, "an object", *node);
  return std::nullopt;
}

const JsonNode* MeasuredFields::list(std::string_view key) {
  const JsonNode* const node = needed(key);
  if (!node || node->is_list()) return node;
  refuse(key, "a list", *node);
  return nullptr;
}

void MeasuredFields::finish() {
  for (const JsonNode& child : node_.children) {
    if (std::ranges::find(known_, child.key) != known_.end()) continue;
    diagnostics_.add(child.key_offset, json_pointer(place_, child.key),
                     "unknown key" + hint_of_names(child.key, known_));
  }
}

std::optional<JsonNode> parse_measurements(std::string_view text, Diagnostics& diagnostics, std::size_t most_values) {
  std::optional<JsonNode> root = parse_json(text, diagnostics, most_values);
  if (!root || root->is_object()) return root;
  diagnostics.add(root->offset, "", "must be an object, got " + describe(*root));
  return std::nullopt;
}

absl::Status status_of(const Diagnostics& diagnostics, const std::string& hint) {
  const absl::Status status = diagnostics.to_status(hint);
  return status.ok() ? status : make_error(ExitCode::kCorruptData, message_of(status));
}

}  // namespace tessera
