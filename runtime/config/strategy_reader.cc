#include "runtime/config/strategy_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

// Reads a strategy. ValueReader checks one value against its row: type, range, choices, the keys of a list's objects.
// StrategyReader goes through the tree and finds the row of each key, or reports an unknown key with the nearest name.
// At the end it checks the conditions of keys that were given, and the rules between keys.

namespace tessera {
namespace {

std::vector<std::string> names_of_keys(const std::vector<StrategyKey>& keys) {
  std::vector<std::string> names;
  for (const StrategyKey& key : keys) names.push_back(key.name());
  return names;
}

// Reads one value, or reports what is wrong with it and where. An empty optional means that the value is wrong.
class ValueReader {
 public:
  ValueReader(const StrategyKey& key, Diagnostics& diagnostics) : key_(key), diagnostics_(diagnostics) {}

  std::optional<nlohmann::json> read(const JsonNode& node) {
    switch (key_.field.kind) {
      case ValueKind::kInteger:
        return number(node, true);
      case ValueKind::kNumber:
        return number(node, false);
      case ValueKind::kOptionalInteger:
        return node.value.is_null() ? node.value : number(node, true);
      case ValueKind::kOptionalNumber:
        return node.value.is_null() ? node.value : number(node, false);
      case ValueKind::kOptionalAxes:
        return node.value.is_null() ? node.value : axes(node);
      case ValueKind::kBoolean:
        return node.value.is_boolean() ? node.value : refuse(node);
      case ValueKind::kChoice:
        return choice(node);
      case ValueKind::kBytes:
        return node.value.is_string() ? bytes(node) : number(node, true);
      case ValueKind::kName:
        return node.value.is_string() ? node.value : refuse(node);
      case ValueKind::kNames:
        return names(node);
      case ValueKind::kNumberPair:
        return number_pair(node);
      case ValueKind::kObjects:
        return objects(node);
      case ValueKind::kVariant:
        return variant(node);
    }
    return std::nullopt;
  }

 private:
  using Result = std::optional<nlohmann::json>;

  Result refuse(const JsonNode& node, const std::string& more = "") {
    return refuse_with(node, fmt::format("must be {}, got {}{}", describe_allowed(key_), describe(node), more));
  }
  Result refuse_with(const JsonNode& node, const std::string& message) {
    diagnostics_.add(node.offset, key_.pointer, message);
    return std::nullopt;
  }
  void refuse_element(const JsonNode& element, std::size_t index, const std::string& message) {
    diagnostics_.add(element.offset, json_pointer(key_.pointer, std::to_string(index)), message);
  }

  Result number(const JsonNode& node, bool whole) {
    if (!node.value.is_number()) return refuse(node);
    const double x = node.value.get<double>();
    if (!key_.range.contains(x) || (whole && x != std::floor(x))) return refuse(node);
    return node.value;
  }

  Result choice(const JsonNode& node) {
    if (!node.value.is_string()) return refuse(node);
    const auto& word = node.value.get_ref<const std::string&>();
    const std::vector<std::string> allowed = names_of(key_.field.choices);
    if (std::find(allowed.begin(), allowed.end(), word) != allowed.end()) return node.value;
    return refuse(node, did_you_mean(word, allowed));
  }

  Result bytes(const JsonNode& node) {
    const absl::StatusOr<std::int64_t> parsed = parse_bytes(node.value.get_ref<const std::string&>());
    if (!parsed.ok()) return refuse_with(node, message_of(parsed.status()));
    if (!key_.range.contains(static_cast<double>(*parsed))) return refuse(node);
    return *parsed;
  }

  Result names(const JsonNode& node) {
    if (!node.is_list()) return refuse(node);
    nlohmann::json list = nlohmann::json::array();
    std::set<std::string> seen;
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const JsonNode& element = node.children[i];
      if (!element.value.is_string() || element.value.get_ref<const std::string&>().empty()) {
        refuse_element(element, i, "must be a non-empty string, got " + describe(element));
      } else if (!seen.insert(element.value.get<std::string>()).second) {
        refuse_element(element, i, describe(element) + " stands in the list already. [T0514] hint: remove one");
      } else {
        list.push_back(element.value);
      }
    }
    return list.size() == node.children.size() ? Result(list) : std::nullopt;
  }

  Result axes(const JsonNode& node) {
    const Result list = names(node);
    if (!list) return list;
    const std::vector<std::string> allowed(kMeshAxes.begin(), kMeshAxes.end());
    bool all_right = true;
    for (std::size_t i = 0; i < list->size(); ++i) {
      const auto& word = (*list)[i].get_ref<const std::string&>();
      if (std::ranges::find(allowed, word) != allowed.end()) continue;
      refuse_element(node.children[i], i,
                     fmt::format("must be one of {}, got {}{}", joined(allowed), describe(node.children[i]),
                                 did_you_mean(word, allowed)));
      all_right = false;
    }
    return all_right ? list : std::nullopt;
  }

  Result number_pair(const JsonNode& node) {
    if (!node.is_list() || node.children.size() != 2) return refuse(node);
    nlohmann::json pair = nlohmann::json::array();
    for (std::size_t i = 0; i < 2; ++i) {
      const JsonNode& element = node.children[i];
      if (element.value.is_number() && key_.range.contains(element.value.get<double>())) {
        pair.push_back(element.value);
      } else {
        refuse_element(element, i,
                       fmt::format("must be a number {}, got {}", describe_range(key_.range), describe(element)));
      }
    }
    return pair.size() == 2 ? Result(pair) : std::nullopt;
  }

  Result objects(const JsonNode& node) {
    if (!node.is_list()) return refuse(node);
    nlohmann::json list = nlohmann::json::array();
    bool all_right = true;
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      list.push_back(nlohmann::json::object());
      all_right = object(node.children[i], json_pointer(key_.pointer, std::to_string(i)), list.back()) && all_right;
    }
    return all_right ? Result(list) : std::nullopt;
  }

  /// Fills `result` from one object of the list. Returns false if something is wrong with the object.
  bool object(const JsonNode& node, const std::string& pointer, nlohmann::json& result) {
    const std::vector<std::string> allowed = names_of_keys(key_.field.members);
    if (!node.is_object()) {
      diagnostics_.add(node.offset, pointer,
                       fmt::format("must be an object (keys: {}), got {}", joined(allowed), describe(node)));
      return false;
    }
    bool all_right = true;
    for (const JsonNode& child : node.children) {
      all_right = member(child, pointer, key_.field.members, result,
                         [&] { return "unknown key" + hint_of_names(child.key, allowed); }) &&
                  all_right;
    }
    return all_right;
  }

  Result variant(const JsonNode& node) {
    if (!node.is_object()) return refuse(node);
    const auto given = std::ranges::find(node.children, std::string(kTypeKey), &JsonNode::key);
    const std::vector<std::string> names = names_of(key_.field.types);
    if (given == node.children.end()) {
      return refuse_with(node, fmt::format("has no \"{}\", which says what it is. [T0739] hint: give it one of {}",
                                           kTypeKey, joined(names)));
    }
    const std::string word = given->value.is_string() ? given->value.get<std::string>() : "";
    const auto type = std::ranges::find(key_.field.types, word, &VariantType::name);
    if (type == key_.field.types.end()) {
      diagnostics_.add(
          given->offset, json_pointer(key_.pointer, kTypeKey),
          fmt::format("must be one of {}, got {}{}", joined(names), describe(*given), did_you_mean(word, names)));
      return std::nullopt;
    }
    nlohmann::json result = {{kTypeKey, type->name}};
    bool all_right = true;
    for (const JsonNode& child : node.children) {
      if (child.key == kTypeKey) continue;
      all_right = member(child, key_.pointer, type->members, result, [&] { return not_of_type(child.key, *type); }) &&
                  all_right;
    }
    return all_right ? Result(result) : std::nullopt;
  }

  /// Returns the error for a key that objects of this type do not have.
  std::string not_of_type(const std::string& name, const VariantType& type) const {
    std::vector<std::string> others;
    for (const VariantType& each : key_.field.types) {
      if (std::ranges::find(each.members, name, &StrategyKey::name) != each.members.end()) others.push_back(each.name);
    }
    if (!others.empty()) {
      return fmt::format(
          "belongs to type {}, and this is of type {}. [T0740] hint: leave it out, or give the other type",
          joined(others, " or "), type.name);
    }
    const std::string who = "unknown key of type " + type.name;
    const std::vector<std::string> own = names_of_keys(type.members);
    return own.empty() ? who + ", which has none but \"type\". [T0741] hint: leave it out"
                       : who + hint_of_names(name, own);
  }

  /// Stores one key of an object in `result`. Returns false if something is wrong with the key. `unknown` gives the
  /// error if no row of `members` has this key.
  template <typename Unknown>
  bool member(const JsonNode& child, const std::string& pointer, const std::vector<StrategyKey>& members,
              nlohmann::json& result, Unknown unknown) {
    const auto found = std::ranges::find(members, child.key, &StrategyKey::name);
    if (found == members.end()) {
      diagnostics_.add(child.key_offset, json_pointer(pointer, child.key), unknown());
      return false;
    }
    StrategyKey member = *found;
    member.pointer = json_pointer(pointer, child.key);
    const auto value = ValueReader(member, diagnostics_).read(child);
    if (value) result[child.key] = *value;
    return value.has_value();
  }

  const StrategyKey& key_;
  Diagnostics& diagnostics_;
};

// Returns the place where the file format has a key of this name: "lr" at the top belongs to "optimizer", and "durable"
// in "offload" to the top.
std::string found_elsewhere(const std::string& name) {
  std::vector<std::string> places;
  const auto add = [&](const std::string& pointer) {
    places.push_back(pointer == "/" + name ? "\"" + name + "\" at the top level of the file" : dotted(pointer));
  };
  for (const StrategyKey& key : strategy_keys()) {
    if (key.name() == name) add(key.pointer);
    for (const VariantType& type : key.field.types) {
      if (std::ranges::find(type.members, name, &StrategyKey::name) != type.members.end())
        places.push_back(dotted(key.pointer) + " of type " + type.name);
    }
  }
  for (const StrategyGroup& group : strategy_groups()) {
    if (group.pointer.ends_with("/" + name)) add(group.pointer);
  }
  return joined(places, " or ");
}

std::size_t offset_of(const std::map<std::string, std::size_t>& given, std::string pointer) {
  while (!pointer.empty()) {
    if (auto at = given.find(pointer); at != given.end()) return at->second;
    pointer.resize(pointer.rfind('/'));
  }
  return 0;
}

}  // namespace

Strategy StrategyReader::read(const JsonNode& root) {
  read_group(root, "");
  fill_in_defaults(strategy_.optimizer);
  check_conditions();
  check_rules();
  return strategy_;
}

Strategy StrategyReader::read_from_code(const JsonNode& root) {
  read_group(root, "");
  check_rules();
  return strategy_;
}

void StrategyReader::read_group(const JsonNode& node, const std::string& pointer) {
  if (!node.is_object()) {
    diagnostics_.add(
        node.offset, pointer,
        fmt::format("must be an object (keys: {}), got {}", joined(names_in_group(pointer)), describe(node)));
    return;
  }
  for (const JsonNode& member : node.children) read_member(member, pointer);
}

void StrategyReader::read_member(const JsonNode& member, const std::string& group) {
  const std::string pointer = json_pointer(group, member.key);
  if (const StrategyKey* key = find_strategy_key(pointer)) {
    given_[pointer] = member.offset;
    read_key(*key, member);
  } else if (is_strategy_group(pointer)) {
    given_[pointer] = member.offset;
    read_group(member, pointer);
  } else if (group.empty() && member.key == kSchemaKey) {
    if (!member.value.is_string()) {
      diagnostics_.add(member.offset, pointer, "must be a string, the place of the schema; got " + describe(member));
    }
  } else {
    refuse_unknown(member, group);
  }
}

void StrategyReader::read_key(const StrategyKey& key, const JsonNode& node) {
  if (const auto value = ValueReader(key, diagnostics_).read(node)) key.field.set(strategy_, *value);
}

void StrategyReader::refuse_unknown(const JsonNode& member, const std::string& group) {
  const std::string pointer = json_pointer(group, member.key);
  const std::vector<std::string> allowed = names_in_group(group);
  std::string hint = did_you_mean(member.key, allowed);
  if (hint.empty()) {
    const std::string elsewhere = found_elsewhere(member.key);
    if (!elsewhere.empty()) hint = fmt::format(". [T0516] hint: did you mean {}?", elsewhere);
  }
  if (hint.empty()) hint = ". [T0517] hint: known here: " + joined(allowed);
  diagnostics_.add(member.key_offset, pointer, "unknown key" + hint);
}

void StrategyReader::check_conditions() {
  for (const StrategyKey& key : strategy_keys()) {
    if (key.only_if.text.empty() || !given_.contains(key.pointer)) continue;
    if (diagnostics_.touches(key.pointer) || any_wrong(key.only_if.reads) || key.only_if.holds(strategy_)) continue;
    const nlohmann::ordered_json value = key.field.get(strategy_);
    // A key that has its default is accepted even without an effect, so that a resolved strategy from to_json() can be
    // read back.
    if (key.says_nothing(value, strategy_)) continue;
    diagnostics_.add(given_.at(key.pointer), key.pointer,
                     fmt::format("{} has no effect: it needs {}. [T0518] hint: leave it out, or change that",
                                 value.dump(), key.only_if.text));
  }
}

void StrategyReader::check_rules() {
  for (const StrategyRule& rule : strategy_rules()) {
    if (any_wrong(rule.keys)) continue;
    const std::string problem = rule.problem(strategy_);
    if (problem.empty()) continue;
    const auto first = std::find_if(rule.keys.begin(), rule.keys.end(),
                                    [&](const std::string& pointer) { return given_.contains(pointer); });
    const std::string& pointer = first == rule.keys.end() ? rule.keys.front() : *first;
    diagnostics_.add(offset_of(given_, pointer), pointer, problem);
  }
}

bool StrategyReader::any_wrong(const std::vector<std::string>& pointers) const {
  return std::any_of(pointers.begin(), pointers.end(),
                     [&](const std::string& pointer) { return diagnostics_.touches(pointer); });
}

}  // namespace tessera
