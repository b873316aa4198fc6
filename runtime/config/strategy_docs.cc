#include "runtime/config/strategy_docs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/base/bytes.h"
#include "runtime/base/text.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

// Makes the schema and the reference page from the table of keys. The first half writes JSON schema, with one function
// for each kind of value. The second half writes Markdown: sections with one table row for each key, the rules, and the
// introduction.

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// Prints whole limits without a fraction.
Json number_json(double x) {
  const auto whole = static_cast<std::int64_t>(x);
  return static_cast<double>(whole) == x ? Json(whole) : Json(x);
}

void add_range(Json& schema, const Range& range) {
  schema[range.open_least ? "exclusiveMinimum" : "minimum"] = number_json(range.least);
  schema[range.open_most ? "exclusiveMaximum" : "maximum"] = number_json(range.most);
}

Json object_schema(const std::string& doc);
void add_properties(Json& schema, const std::vector<StrategyKey>& members);

void add_type(Json& schema, const StrategyKey& key) {
  switch (key.field.kind) {
    case ValueKind::kInteger:
      schema["type"] = "integer";
      return add_range(schema, key.range);
    case ValueKind::kNumber:
      schema["type"] = "number";
      return add_range(schema, key.range);
    case ValueKind::kOptionalInteger:
      schema["type"] = {"integer", "null"};
      return add_range(schema, key.range);
    case ValueKind::kOptionalNumber:
      schema["type"] = {"number", "null"};
      return add_range(schema, key.range);
    case ValueKind::kOptionalAxes:
      schema["type"] = {"array", "null"};
      for (const char* const axis : kMeshAxes) schema["items"]["enum"].push_back(axis);
      schema["uniqueItems"] = true;
      return;
    case ValueKind::kBoolean:
      schema["type"] = "boolean";
      return;
    case ValueKind::kChoice:
      schema["type"] = "string";
      for (const Choice& choice : key.field.choices) schema["enum"].push_back(choice.name);
      return;
    case ValueKind::kBytes:
      schema["type"] = {"integer", "string"};
      schema["pattern"] = std::string(kBytesPattern);
      return add_range(schema, key.range);
    case ValueKind::kName:
      schema["type"] = "string";
      return;
    case ValueKind::kNames:
      schema["type"] = "array";
      schema["items"] = {{"type", "string"}, {"minLength", 1}};
      schema["uniqueItems"] = true;
      return;
    case ValueKind::kNumberPair:
      schema["type"] = "array";
      schema["items"]["type"] = "number";
      add_range(schema["items"], key.range);
      schema["minItems"] = schema["maxItems"] = 2;
      return;
    case ValueKind::kObjects:
      schema["type"] = "array";
      schema["items"] = object_schema(key.doc);
      add_properties(schema["items"], key.field.members);
      return;
    case ValueKind::kVariant:
      for (const VariantType& type : key.field.types) {
        Json& one = schema["oneOf"].emplace_back(object_schema(type.doc));
        one["properties"][kTypeKey] = {{"const", type.name}};
        one["required"] = {kTypeKey};
        add_properties(one, type.members);
      }
      return;
  }
}

std::string code(const std::string& text) { return "`" + text + "`"; }

/// Returns a text such as "`0.01` (adamw, lamb), `0.0` (adam, sgd)". It has all types with which the key has an effect.
std::string defaults_of_types(const StrategyKey& key) {
  std::vector<std::pair<Json, std::vector<std::string>>> defaults;
  for (const Named<OptimizerType>& type : optimizer_types()) {
    Strategy strategy;
    strategy.optimizer.type = type.value;
    if (!key.only_if.text.empty() && !key.only_if.holds(strategy)) continue;
    const Json value = key.rules_default(type.value, OptimizerConfig::kDefaultsVersion);
    auto found = std::ranges::find(defaults, value, &std::pair<Json, std::vector<std::string>>::first);
    if (found == defaults.end()) found = defaults.emplace(found, value, std::vector<std::string>());
    found->second.push_back(type.name);
  }
  if (defaults.size() == 1) return code(defaults[0].first.dump());
  std::vector<std::string> texts;
  for (const auto& [value, types] : defaults)
    texts.push_back(fmt::format("{} ({})", code(value.dump()), joined(types)));
  return joined(texts);
}

std::string with_unit(const StrategyKey& key) { return key.unit.empty() ? "" : " Unit: " + key.unit + "."; }

Json schema_of(const StrategyKey& key) {
  Json schema = Json::object();
  schema["description"] =
      key.doc + with_unit(key) + (key.only_if.text.empty() ? "" : " Only with " + key.only_if.text + ".");
  add_type(schema, key);
  if (key.rules_default) {
    schema["description"].get_ref<std::string&>() += " Default: " + defaults_of_types(key) + ".";
  } else {
    schema["default"] = Json::parse(key.default_json);
  }
  schema["examples"] = Json::array({Json::parse(key.example_json)});
  return schema;
}

Json object_schema(const std::string& doc) {
  Json schema = Json::object();
  schema["description"] = doc;
  schema["type"] = "object";
  schema["additionalProperties"] = false;
  schema["properties"] = Json::object();
  return schema;
}

void add_properties(Json& schema, const std::vector<StrategyKey>& members) {
  for (const StrategyKey& member : members) schema["properties"][member.name()] = schema_of(member);
}

// Returns the place of a key in the schema: "/properties/a/properties/b" for "/a/b".
Json::json_pointer place_in_schema(const std::string& pointer) {
  std::string place;
  for (const char c : pointer) place += c == '/' ? std::string("/properties/") : std::string(1, c);
  return Json::json_pointer(place);
}

// Makes a Markdown table cell: it escapes the bars of `text`, which must have no line breaks.
std::string cell(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string row_of(const StrategyKey& key) {
  std::string meaning = key.doc;
  if (!key.only_if.text.empty()) meaning += " *Only with " + key.only_if.text + ".*";
  const std::string allowed =
      describe_allowed(key) + (key.unit.empty() || key.field.kind == ValueKind::kBytes ? "" : " (" + key.unit + ")");
  return fmt::format("| {} | {} | {} | {} | {} | {} |\n", code(key.name()), cell(meaning), cell(allowed),
                     key.rules_default ? defaults_of_types(key) : code(key.default_json), code(key.example_json),
                     cell(key.cost));
}

std::string choices_of(const StrategyKey& key) {
  std::string text = fmt::format("\nValues of {}:\n\n", code(key.name()));
  for (const Choice& choice : key.field.choices) text += fmt::format("- {}: {}\n", code(choice.name), choice.doc);
  return text;
}

constexpr char kTableHead[] =
    "| key | meaning | allowed | default | example | what raising it costs |\n|---|---|---|---|---|---|\n";

std::string table_of(const std::string& title, const std::vector<StrategyKey>& members) {
  std::string text = fmt::format("\n{}:\n\n{}", title, kTableHead);
  for (const StrategyKey& member : members) text += row_of(member);
  return text;
}

std::string types_of(const StrategyKey& key) {
  std::string text = fmt::format("\nTypes of {}:\n\n", code(key.name()));
  for (const VariantType& type : key.field.types)
    text += fmt::format("- {}: {} {}\n", code(type.name), type.doc, type.cost);
  for (const VariantType& type : key.field.types) {
    if (!type.members.empty())
      text += table_of(fmt::format("Keys of {} of type {}", code(key.name()), code(type.name)), type.members);
  }
  return text;
}

std::string section_of(const std::string& group, const std::string& title, const std::string& doc) {
  std::string text = fmt::format("## {}\n\n{}\n\n", title, doc);
  text += kTableHead;
  std::string choices;
  for (const StrategyKey& key : strategy_keys()) {
    if (key.group() != group) continue;
    text += row_of(key);
    if (key.field.kind == ValueKind::kChoice) choices += choices_of(key);
    if (key.field.kind == ValueKind::kObjects)
      choices += table_of("Keys of an object in " + code(key.name()), key.field.members);
    if (key.field.kind == ValueKind::kVariant) choices += types_of(key);
  }
  return text + choices + "\n";
}

std::string rules_section() {
  std::string text = "## Combinations\n\nWhat a table cannot say. A file that breaks one of these is refused:\n\n";
  for (const StrategyRule& rule : strategy_rules()) text += "- " + rule.doc + "\n";
  text += "- A key marked *only with* holds its default wherever it would have no effect: no option is ignored.\n";
  return text + "\n";
}

constexpr char kIntroduction[] = R"(# The strategy file

<!-- Made by tessera_strategy_docs from the rows in runtime/config/keys/. Change a row, not this page. -->

One JSON object says how a model is trained. Every key may be left out; `{}` is the file of all defaults. For example:

```json
)";

constexpr char kReading[] = R"(```

A file is read strictly: JSON without comments or trailing commas, at most 1 MiB, UTF-8, every key known and given once.
All errors are reported together, each with its place, and the program ends with exit code 78:

```
strategy.json:4:40: /optimizer/lr: must be a number from 0 to 1000, got the string "fast"
strategy.json:6:3: /gradient_cliping: unknown key. [T0426] hint: did you mean "gradient_clipping"?
```

Integers may be written `1000`, `1000.0` or `1e3`. Sizes are bytes, or strings such as `"8GiB"`, `"1.5 GiB"` (powers of
1024) and `"500MB"` (powers of 1000). For completion in an editor, name the schema: `"$schema": "strategy.schema.json"`.

Numbers of `optimizer` that are left out are those of `torch.optim` for the rule of the same name, key by key. PyTorch has no `lion`, `lamb`
and `lars`: theirs are those of [timm](https://github.com/huggingface/pytorch-image-models). `own` and `own_matrix` have `adamw`'s. Tessera
0.1 had `adamw`'s for every rule. A run that began with 0.1 keeps those when it goes on from its checkpoint or commit, and the log says so.

)";

}  // namespace

std::string strategy_schema() {
  Json root = Json::object();
  root["$schema"] = "http://json-schema.org/draft-07/schema#";
  root["title"] = "Tessera strategy file";
  root.update(object_schema("How a model is trained. Contradictions between keys: see docs/strategy.md."));
  root["properties"][kSchemaKey] = {{"description", "Where an editor finds this schema."}, {"type", "string"}};
  for (const StrategyKey& key : strategy_keys()) {
    // A group is added before its first key, so that the schema has the order of the table.
    for (const StrategyGroup& group : strategy_groups()) {
      const bool holds_key = key.pointer.starts_with(group.pointer + "/");
      if (holds_key && !root.contains(place_in_schema(group.pointer))) {
        root[place_in_schema(group.pointer)] = object_schema(group.doc);
      }
    }
    root[place_in_schema(key.pointer)] = schema_of(key);
  }
  return root.dump(2) + "\n";
}

std::string strategy_example() {
  return R"({
  "strategy": "FULL_SHARD",
  "units": {"classes": ["Block"]},
  "mixed_precision": {"param": "bf16", "reduce": "fp32"},
  "optimizer": {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
  "lr_schedule": {"type": "cosine", "warmup_steps": 500, "total_steps": 10000, "min_ratio": 0.1},
  "gradient_clipping": 1.0,
  "gradient_accumulation": 4,
  "memory": {"limit": "8GiB"}
}
)";
}

std::string strategy_reference() {
  std::string text = kIntroduction + strategy_example() + kReading;
  text += section_of("", "Top level", "Keys that stand in no group.");
  for (const StrategyGroup& group : strategy_groups())
    text += section_of(group.pointer, code(dotted(group.pointer)), group.doc);
  text += rules_section();
  return text + "## Everything at its default\n\n```json\n" + Strategy{}.to_json() + "\n```\n";
}

}  // namespace tessera
