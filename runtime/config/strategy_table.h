#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The strategy file as a table: one row a key. Reading a file, printing the resolved strategy, the JSON
/// schema and the reference page all come from these rows, so a key added here is added everywhere. Also
/// here: what a row cannot say because it concerns several keys (StrategyRule), and names of other versions
/// (UnavailableKey).

enum class ValueKind {
  kInteger,          ///< JSON number without fraction, so 4, 4.0 and 1e6
  kNumber,           ///< JSON number
  kBoolean,          ///< true or false
  kChoice,           ///< one of StrategyField::choices
  kBytes,            ///< integer, or string that parse_bytes reads
  kName,             ///< string
  kNames,            ///< list of different non-empty strings
  kNumberPair,       ///< list of two numbers
  kOptionalInteger,  ///< as kInteger, or null: not given
  kOptionalNumber,   ///< JSON number, or null: not given
  kObjects,          ///< list of objects, each with some of StrategyField::members
};

struct Choice {
  std::string name;
  std::string doc;
};

struct StrategyKey;

/// Where in the struct a key lives. `set` takes JSON of the right kind and range (bytes as an integer).
struct StrategyField {
  ValueKind kind = ValueKind::kInteger;
  std::vector<Choice> choices;
  std::function<void(Strategy&, const nlohmann::json&)> set;
  std::function<nlohmann::ordered_json(const Strategy&)> get;
  std::vector<StrategyKey> members;  ///< kObjects: keys of an object, read into JSON and set as a whole
};

/// least <= x <= most; an end that is `open` is itself excluded.
struct Range {
  double least = 0;
  double most = 0;
  bool open_least = false;
  bool open_most = false;
  bool contains(double x) const;
};

/// When a key has an effect. Elsewhere any value but the default is refused: no option is silently ignored.
struct Condition {
  std::string text;                ///< "optimizer.type sgd"; empty: always
  std::vector<std::string> reads;  ///< pointers of the keys it looks at
  std::function<bool(const Strategy&)> holds;
};

/// A default that depends on the optimizer's type (OrDefault). `version`: OptimizerConfig::defaults_version.
using RulesDefault = std::function<nlohmann::ordered_json(OptimizerType type, std::int64_t version)>;

struct StrategyKey {
  std::string pointer;  ///< RFC 6901: "/optimizer/lr"
  StrategyField field;
  Range range = {};          ///< of integers and numbers, of each in a pair
  std::string unit = {};     ///< of numbers; empty: a plain number
  std::string default_json;  ///< with optimizer.type adamw, where it depends on that
  std::string example_json;
  std::string doc;   ///< one line
  std::string cost;  ///< what raising it (or turning it on) costs
  Condition only_if = {};
  RulesDefault rules_default = {};  ///< empty: the default is default_json, whatever the type

  std::string name() const;   ///< "lr"
  std::string group() const;  ///< "/optimizer"; "" at the top
  /// Whether the value is the key's default, of this version or of an earlier one: a resolved strategy that to_json wrote has all of them.
  bool says_nothing(const nlohmann::ordered_json& value, const Strategy& strategy) const;
};

/// An object of the file.
struct StrategyGroup {
  std::string pointer;
  std::string doc;
};

/// A rule between keys, which a file can contradict.
struct StrategyRule {
  std::vector<std::string> keys;  ///< pointers of all it reads; reported at the first that the file gives
  std::string doc;                ///< the rule, as a sentence
  /// What is wrong and what to do; empty if nothing is.
  std::function<std::string(const Strategy&)> problem;
};

/// A key of the file format that this version does not have.
struct UnavailableKey {
  std::string pointer;
  std::string doc;
};

const std::vector<StrategyKey>& strategy_keys();      ///< in the order of the page; keys of a group stand together
const std::vector<StrategyGroup>& strategy_groups();  ///< every group, holders before what they hold; not the top
const std::vector<StrategyRule>& strategy_rules();
const std::vector<UnavailableKey>& unavailable_keys();

/// Top-level key that editors read to find the schema. Allowed, a string, without any effect on training.
inline constexpr char kSchemaKey[] = "$schema";

const StrategyKey* find_strategy_key(const std::string& pointer);
bool is_strategy_group(const std::string& pointer);
/// "/optimizer/lr" as people write it: "optimizer.lr".
std::string dotted(const std::string& pointer);
/// Keys and groups directly in a group ("" for the top).
std::vector<std::string> names_in_group(const std::string& group);

/// "from 0 to 10", "above 0, at most 1", "from 0 to below 1", "between 0 and 1".
std::string describe_range(const Range& range);
/// "an integer from 1 to 64", "one of fp32, bf16, fp16", ...
std::string describe_allowed(const StrategyKey& key);

}  // namespace tessera
