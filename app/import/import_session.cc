#include "app/import/import_session.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <system_error>

#include "runtime/base/text.h"
#include "runtime/config/strategy_table.h"

namespace tessera::app {
namespace {

constexpr std::size_t kLongestValue = 60;
constexpr std::size_t kLongestPath = 100;
constexpr double kExactInteger = 9007199254740992.0;  // doubles up to 2^53 hold every integer

bool is_integer(double x) { return std::floor(x) == x && std::fabs(x) <= kExactInteger; }

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

std::string stripped(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

std::string dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// Control characters of a file must not reach a terminal: JSON escapes them.
std::string shown(const nlohmann::json& value) {
  if (value.is_number_float() && is_integer(value.get<double>()))
    return std::to_string(static_cast<std::int64_t>(value.get<double>()));
  return value.is_string() ? quoted_text(value.get_ref<const std::string&>(), kLongestValue)
                           : clipped(dump(value), kLongestValue);
}

// What of a number's kind and range the table of keys would refuse; all else is looked at when the strategy is whole.
std::string problem_of(const StrategyKey& key, const nlohmann::json& value) {
  const auto wrong = [&](const nlohmann::json& each) {
    return !each.is_number() || !key.range.contains(each.get<double>());
  };
  switch (key.field.kind) {
    case ValueKind::kInteger:
    case ValueKind::kOptionalInteger:
      if (!wrong(value) && is_integer(value.get<double>())) return "";
      break;
    case ValueKind::kNumber:
    case ValueKind::kOptionalNumber:
      if (!wrong(value)) return "";
      break;
    case ValueKind::kNumberPair:
      if (value.is_array() && value.size() == 2 && std::none_of(value.begin(), value.end(), wrong)) return "";
      break;
    default:
      return "";
  }
  return dotted(key.pointer) + " must be " + describe_allowed(key);
}

}  // namespace

const JsonNode* ImportSession::find(const std::string& name) const {
  for (const ConfigKey& key : keys_)
    if (key.name == name && !key.node->value.is_null()) return key.node;
  return nullptr;
}

bool ImportSession::is_on(const std::string& name) const {
  const JsonNode* node = find(name);
  return node != nullptr && bool_of(*node) == true;
}

bool ImportSession::is_auto(const std::string& name) const {
  const JsonNode* node = find(name);
  return node != nullptr && word_of(*node) == "auto";
}

bool ImportSession::put(const ConfigKey& key, const std::string& pointer, nlohmann::json value,
                        const std::string& more) {
  const StrategyKey* row = find_strategy_key(pointer);
  if (row != nullptr) {
    if (const std::string problem = problem_of(*row, value); !problem.empty()) {
      refused(key, problem);
      return false;
    }
    if (row->field.kind == ValueKind::kInteger) value = static_cast<std::int64_t>(value.get<double>());
  }
  mapped(key, setting_text(pointer, value) + (more.empty() ? "" : ". " + more));
  set(pointer, std::move(value));
  return true;
}

void ImportSession::imply(const std::string& pointer, nlohmann::json value, std::string why) {
  if (is_set(pointer)) return;
  set(pointer, value);
  implied_.push_back({pointer, std::move(value), std::move(why)});
}

void ImportSession::decide(const ConfigKey& key, Fate fate, std::string text) {
  const std::string clean = quoted_text(key.path, kLongestPath);
  fates_.push_back(
      {clean.substr(1, clean.size() - 2), shown(json_of(*key.node)), fate, std::move(text), key.node->offset});
}

nlohmann::json json_of(const JsonNode& node) {
  nlohmann::json value = node.value;
  for (const JsonNode& child : node.children) {
    if (node.is_object())
      value[child.key] = json_of(child);
    else
      value.push_back(json_of(child));
  }
  return value;
}

std::optional<bool> bool_of(const JsonNode& node) {
  if (node.value.is_boolean()) return node.value.get<bool>();
  const std::string word = word_of(node);
  for (const char* yes : {"true", "yes", "on"})
    if (word == yes) return true;
  for (const char* no : {"false", "no", "off"})
    if (word == no) return false;
  return std::nullopt;
}

std::optional<double> number_of(const JsonNode& node) {
  if (node.value.is_number()) return node.value.get<double>();
  if (!node.value.is_string()) return std::nullopt;
  const std::string text = stripped(node.value.get_ref<const std::string&>());
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::optional<std::int64_t> integer_of(const JsonNode& node) {
  const std::optional<double> value = number_of(node);
  return value && is_integer(*value) ? std::optional(static_cast<std::int64_t>(*value)) : std::nullopt;
}

std::string word_of(const JsonNode& node) {
  return node.value.is_string() ? lower(stripped(node.value.get_ref<const std::string&>())) : "";
}

std::optional<std::vector<std::string>> names_of(const JsonNode& node) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  if (node.value.is_string()) {
    const auto& text = node.value.get_ref<const std::string&>();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find(',', at), text.size());
      add(stripped(text.substr(at, end - at)));
      at = end + 1;
    }
    return names;
  }
  if (!node.is_list()) return std::nullopt;
  for (const JsonNode& child : node.children) {
    if (!child.value.is_string()) return std::nullopt;
    add(stripped(child.value.get_ref<const std::string&>()));
  }
  return names;
}

std::string setting_text(const std::string& pointer, const nlohmann::json& value) {
  return dotted(pointer) + " = " + clipped(dump(value), 200);
}

}  // namespace tessera::app
