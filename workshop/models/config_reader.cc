#include "workshop/models/config_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/text.h"

namespace tessera::models {

const JsonNode* ConfigReader::find(const std::string& key, bool required) {
  known_.push_back(key);
  const auto found = std::find_if(root_.children.begin(), root_.children.end(),
                                  [&](const JsonNode& child) { return child.key == key; });
  if (found != root_.children.end()) return &*found;
  if (required) diagnostics_.add(root_.offset, json_pointer(place_, key), "is needed, but not there");
  return nullptr;
}

void ConfigReader::wrong(const std::string& key, const std::string& message) {
  const auto found = std::find_if(root_.children.begin(), root_.children.end(),
                                  [&](const JsonNode& child) { return child.key == key; });
  diagnostics_.add(found == root_.children.end() ? root_.offset : found->offset, json_pointer(place_, key), message);
}

void ConfigReader::integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char*) {
  const JsonNode* node = find(key, rule.required);
  if (node == nullptr) return;
  // Values above 2^63 - 1 are unsigned in nlohmann's tree, and are out of range here.
  const bool fits = node->value.is_number_integer() &&
                    (!node->value.is_number_unsigned() || node->value.get<std::uint64_t>() <= INT64_MAX);
  const std::int64_t given = fits ? node->value.get<std::int64_t>() : 0;
  if (!fits || given < rule.least || given > rule.most) {
    return wrong(key, fmt::format("must be an integer from {} to {}, got {}", rule.least, rule.most, describe(*node)));
  }
  value = given;
}

void ConfigReader::number(const std::string& key, double& value, const NumberRule& rule, const char*) {
  const JsonNode* node = find(key, false);
  if (node == nullptr) return;
  const double given = node->value.is_number() ? node->value.get<double>() : -1.0;
  const bool low = rule.least_excluded ? given <= rule.least : given < rule.least;
  if (!node->value.is_number() || low || given >= rule.below) {
    return wrong(key, fmt::format("must be a number {} {} and below {}, got {}", rule.least_excluded ? "above" : "from",
                                  rule.least, rule.below, describe(*node)));
  }
  value = given;
}

void ConfigReader::boolean(const std::string& key, bool& value, const char*) {
  const JsonNode* node = find(key, false);
  if (node == nullptr) return;
  if (!node->value.is_boolean()) return wrong(key, fmt::format("must be true or false, got {}", describe(*node)));
  value = node->value.get<bool>();
}

void ConfigReader::word(const std::string& key, std::string& value, const std::vector<std::string>& allowed,
                        const char*) {
  const JsonNode* node = find(key, false);
  if (node != nullptr) read_word(*node, key, value, allowed);
}

std::string ConfigReader::needed_word(const std::string& key, const std::vector<std::string>& allowed) {
  std::string value;
  const JsonNode* node = find(key, true);
  if (node != nullptr) read_word(*node, key, value, allowed);
  return value;
}

void ConfigReader::read_word(const JsonNode& node, const std::string& key, std::string& value,
                             const std::vector<std::string>& allowed) {
  const std::string given = node.value.is_string() ? node.value.get<std::string>() : "";
  if (std::find(allowed.begin(), allowed.end(), given) != allowed.end()) {
    value = given;
    return;
  }
  wrong(key, fmt::format("must be one of {}, got {}{}", joined(allowed), describe(node), did_you_mean(given, allowed)));
}

void ConfigReader::require(bool holds, const std::string& key, const std::vector<std::string>& keys,
                           const std::string& message) {
  const bool wrong_already = std::any_of(keys.begin(), keys.end(), [&](const std::string& other) {
    return diagnostics_.touches(json_pointer(place_, other));
  });
  if (!holds && !wrong_already) wrong(key, message);
}

std::vector<std::string> ConfigReader::unknown() const {
  std::vector<std::string> keys;
  for (const JsonNode& child : root_.children)
    if (std::find(known_.begin(), known_.end(), child.key) == known_.end()) keys.push_back(child.key);
  return keys;
}

void ConfigReader::finish() {
  for (const JsonNode& child : root_.children) {
    if (std::find(known_.begin(), known_.end(), child.key) != known_.end()) continue;
    diagnostics_.add(child.key_offset, json_pointer(place_, child.key),
                     "unknown key" + hint_of_names(child.key, known_));
  }
}

}  // namespace tessera::models
