#pragma once

// See docs/glossary.md: unit.

#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The strategy file as a table with one row for each key. Reading a file, printing the resolved strategy, the JSON
/// schema and the reference page all come from these rows, so a key added here is added everywhere. Rules between
/// several keys (StrategyRule) are here too.

/// The kind of JSON value that a key takes.
enum class ValueKind {
  kInteger,          ///< JSON number without fraction, such as 4, 4.0 and 1e6
  kNumber,           ///< JSON number
  kBoolean,          ///< true or false
  kChoice,           ///< one of StrategyField::choices
  kBytes,            ///< integer, or string that parse_bytes reads
  kName,             ///< string
  kNames,            ///< list of different non-empty strings
  kNumberPair,       ///< list of two numbers
  kOptionalInteger,  ///< like kInteger, or null: not given
  kOptionalNumber,   ///< JSON number, or null: not given
  kOptionalAxes,     ///< list of different names among kMeshAxes, or null: not given
  kObjects,          ///< list of objects, each with some of StrategyField::members
  kVariant,          ///< object whose "type" is one of StrategyField::types, and decides which other keys it has
};

/// The names of the mesh's axes, as a value of kind kOptionalAxes has them.
inline constexpr const char* kHostAxis = "host";
inline constexpr const char* kRankAxis = "rank";
inline constexpr std::array kMeshAxes = {kHostAxis, kRankAxis};

/// One word that a key allows, with a description of its effect.
struct Choice {
  std::string name;
  std::string doc;
};

/// least <= x <= most; an `open` end is itself excluded.
struct Range {
  double least = 0;
  double most = 0;
  bool open_least = false;
  bool open_most = false;
  bool contains(double x) const;
  friend bool operator==(const Range&, const Range&) = default;
};

struct StrategyKey;

/// One type of an object of kind kVariant.
struct VariantType {
  std::string name;  ///< value of "type" in the file
  std::string doc;
  std::string cost;
  /// The keys of an object of this type. Their fields may be used only while the object has this type.
  std::vector<StrategyKey> members;
  std::function<void(Strategy&)> choose;  ///< gives the object this type, with all members at their defaults
};
/// The key of an object of kind kVariant that says which type it is.
inline constexpr char kTypeKey[] = "type";

/// The member of Strategy in which the value of a key is stored. `set` takes JSON of the right kind and range (bytes as
/// an integer).
struct StrategyField {
  ValueKind kind = ValueKind::kInteger;
  std::vector<Choice> choices;
  std::function<void(Strategy&, const nlohmann::json&)> set;
  std::function<nlohmann::ordered_json(const Strategy&)> get;
  std::vector<StrategyKey> members;  ///< kObjects: keys of an object, which is read into JSON and set as a whole
  std::vector<VariantType> types;    ///< kVariant
  // The members that a StrategyKey takes from its field unless its row sets them. The makers in strategy_fields.h fill
  // these in.
  std::string pointer = {};  ///< the path of the member: "/optimizer/lr"
  Range range = {};
  std::string unit = {};
};

/// The condition under which a key has an effect. If it does not hold, any value except the default is refused: no
/// option is silently ignored.
struct Condition {
  std::string text;                ///< "optimizer.type sgd"; empty: always
  std::vector<std::string> reads;  ///< pointers of the keys that the condition reads
  std::function<bool(const Strategy&)> holds;
};

/// A default that depends on the optimizer's type (OrDefault). `version` is OptimizerConfig::defaults_version.
using RulesDefault = std::function<nlohmann::ordered_json(OptimizerType type, std::int64_t version)>;

/// One row of the table: a key of the file. Most rows leave pointer, range and unit to their field, and the default to
/// an unchanged Strategy: strategy_keys() fills these members in.
struct StrategyKey {
  std::string pointer = {};  ///< RFC 6901: "/optimizer/lr"
  StrategyField field;
  Range range = {};               ///< range of integers and numbers, and of each number in a pair
  std::string unit = {};          ///< unit of numbers; empty: a plain number
  std::string default_json = {};  ///< default; that of optimizer.type adamw if it depends on the type
  std::string example_json;
  std::string doc;   ///< one line of documentation
  std::string cost;  ///< cost of raising the value (or of turning the key on)
  Condition only_if = {};
  RulesDefault rules_default = {};  ///< empty: the default is default_json, whatever the type

  std::string name() const;   ///< "lr"
  std::string group() const;  ///< "/optimizer"; "" at the top
  /// Returns whether the value is the key's default, of this version or of an earlier one. A resolved strategy that
  /// to_json wrote has all keys, those with defaults too.
  bool says_nothing(const nlohmann::ordered_json& value, const Strategy& strategy) const;
};

/// An object of the file.
struct StrategyGroup {
  std::string pointer;
  std::string doc;
};

/// A rule between keys. A file can break it.
struct StrategyRule {
  std::vector<std::string> keys;  ///< pointers of keys that the rule reads; errors are reported at the first given key
  std::string doc;                ///< the rule, as a sentence
  /// Returns the problem and its remedy; empty if nothing is wrong.
  std::function<std::string(const Strategy&)> problem;
};

const std::vector<StrategyKey>& strategy_keys();  ///< in the order of docs/strategy.md; keys of a group are neighbours
/// Returns every group except the top. An outer group comes before its inner groups.
const std::vector<StrategyGroup>& strategy_groups();
const std::vector<StrategyRule>& strategy_rules();

/// Top-level key that editors read to find the schema. Its value is a string, which has no effect on training.
inline constexpr char kSchemaKey[] = "$schema";

/// Returns the row of a key; null if there is none.
const StrategyKey* find_strategy_key(const std::string& pointer);
bool is_strategy_group(const std::string& pointer);
/// Returns "/optimizer/lr" as people write it: "optimizer.lr".
std::string dotted(const std::string& pointer);
/// Returns the names of Choices or VariantTypes.
template <typename Named>
std::vector<std::string> names_of(const std::vector<Named>& list) {
  std::vector<std::string> names;
  for (const Named& each : list) names.push_back(each.name);
  return names;
}
/// Returns the keys and groups directly in a group ("" for the top).
std::vector<std::string> names_in_group(const std::string& group);

/// Returns a text such as "from 0 to 10", "above 0, at most 1", "from 0 to below 1", "between 0 and 1".
std::string describe_range(const Range& range);
/// Returns a text such as "an integer from 1 to 64", "one of fp32, bf16, fp16", ...
std::string describe_allowed(const StrategyKey& key);

}  // namespace tessera
