#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/bytes.h"
#include "runtime/base/text.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

std::string holder_of(const std::string& pointer) { return pointer.substr(0, pointer.rfind('/')); }
std::string last_name_of(const std::string& pointer) { return pointer.substr(pointer.rfind('/') + 1); }

// Writes whole numbers below 10^10 in full ("1000000"), and other numbers as short as possible ("1e-30", "1e12").
std::string number(double x) {
  const bool whole = x < 1e10 && x == static_cast<double>(static_cast<std::int64_t>(x));
  std::string text = whole ? fmt::format("{}", static_cast<std::int64_t>(x)) : fmt::format("{:g}", x);
  if (const auto plus = text.find("e+"); plus != std::string::npos) text.erase(plus + 1, 1);
  return text;
}

}  // namespace

bool Range::contains(double x) const {
  return (open_least ? x > least : x >= least) && (open_most ? x < most : x <= most);
}

std::string StrategyKey::name() const { return last_name_of(pointer); }
std::string StrategyKey::group() const { return holder_of(pointer); }

bool StrategyKey::says_nothing(const nlohmann::ordered_json& value, const Strategy& strategy) const {
  if (!rules_default) return value == nlohmann::ordered_json::parse(default_json);
  for (std::int64_t version = 1; version <= OptimizerConfig::kDefaultsVersion; ++version) {
    if (value == rules_default(strategy.optimizer.type, version)) return true;
  }
  return false;
}

const StrategyKey* find_strategy_key(const std::string& pointer) {
  for (const StrategyKey& key : strategy_keys()) {
    if (key.pointer == pointer) return &key;
  }
  return nullptr;
}

bool is_strategy_group(const std::string& pointer) {
  const auto& groups = strategy_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const StrategyGroup& g) { return g.pointer == pointer; });
}

std::vector<std::string> names_in_group(const std::string& group) {
  std::vector<std::string> names;
  // A group is listed at its first key, so the order is that of the table.
  for (const StrategyKey& key : strategy_keys()) {
    if (!key.pointer.starts_with(group + "/")) continue;
    const std::string rest = key.pointer.substr(group.size() + 1);
    const std::string name = rest.substr(0, rest.find('/'));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

std::string describe_range(const Range& range) {
  if (range.open_least && range.open_most)
    return fmt::format("between {} and {}", number(range.least), number(range.most));
  if (range.open_least) return fmt::format("above {}, at most {}", number(range.least), number(range.most));
  if (range.open_most) return fmt::format("from {} to below {}", number(range.least), number(range.most));
  return fmt::format("from {} to {}", number(range.least), number(range.most));
}

namespace {

std::string bytes_range(const Range& range) {
  const std::string most = "at most " + format_bytes(static_cast<std::int64_t>(range.most));
  return range.least > 0 ? "at least " + format_bytes(static_cast<std::int64_t>(range.least)) + ", " + most : most;
}

}  // namespace

std::string describe_allowed(const StrategyKey& key) {
  switch (key.field.kind) {
    case ValueKind::kInteger:
      return "an integer " + describe_range(key.range);
    case ValueKind::kNumber:
      return "a number " + describe_range(key.range);
    case ValueKind::kOptionalInteger:
      return "null or an integer " + describe_range(key.range);
    case ValueKind::kOptionalNumber:
      return "null or a number " + describe_range(key.range);
    case ValueKind::kOptionalAxes:
      return fmt::format("null or a list of different axes ({})",
                         joined(std::vector<std::string>(kMeshAxes.begin(), kMeshAxes.end())));
    case ValueKind::kBoolean:
      return "true or false";
    case ValueKind::kBytes:
      return "a number of bytes (" + bytes_range(key.range) + "), or a string such as \"8GiB\" or \"500MB\"";
    case ValueKind::kName:
      return "a string";
    case ValueKind::kNames:
      return "a list of different non-empty strings";
    case ValueKind::kNumberPair:
      return "a list of two numbers, each " + describe_range(key.range);
    case ValueKind::kObjects:
      return "a list of objects, each with some of the keys below";
    case ValueKind::kVariant:
      return fmt::format("an object whose \"{}\" is one of {}", kTypeKey, joined(names_of(key.field.types)));
    case ValueKind::kChoice:
      break;
  }
  return "one of " + joined(names_of(key.field.choices));
}

}  // namespace tessera
