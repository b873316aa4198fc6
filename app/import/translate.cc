#include "app/import/translate.h"

#include <algorithm>
#include <string_view>

#include "app/import/import_formats.h"
#include "app/import/yaml_document.h"
#include "runtime/base/diagnostics.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_table.h"

namespace tessera::app {
namespace {

using Json = nlohmann::ordered_json;

bool is_json(const std::string& text, const std::string& name) {
  if (name.ends_with(".json")) return true;
  if (name.ends_with(".yaml") || name.ends_with(".yml")) return false;
  const std::size_t mark = text.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  const std::size_t first = text.find_first_not_of(" \t\r\n", mark);
  return first != std::string::npos && text[first] == '{';
}

absl::StatusOr<JsonNode> parse(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  std::optional<JsonNode> root = is_json(text, name) ? parse_json(text, diagnostics, kMostConfigValues)
                                                     : parse_yaml(text, diagnostics, kMostConfigValues);
  if (root && !root->is_object())
    diagnostics.add(root->offset, "", "must be an object with keys, got " + describe(*root));
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status("docs/import-config.md says which files are read"));
  return *std::move(root);
}

void collect_keys(const JsonNode& node, const std::string& path, std::vector<ConfigKey>& keys) {
  for (const JsonNode& child : node.children) {
    const std::string child_path = path.empty() ? child.key : path + "." + child.key;
    if (child.is_object() && !child.children.empty())
      collect_keys(child, child_path, keys);
    else
      keys.push_back({child_path, child_path, &child});
  }
}

std::size_t known_keys(const ImportFormat& format, const std::vector<ConfigKey>& keys) {
  return static_cast<std::size_t>(std::count_if(keys.begin(), keys.end(), [&](const ConfigKey& key) {
    return row_of(format.rows, format.row_name(key.path)) != nullptr;
  }));
}

// The format that knows most of the keys; null where none knows any.
const ImportFormat* detect(const std::vector<ConfigKey>& keys) {
  const ImportFormat* best = nullptr;
  std::size_t most = 0;
  for (const ImportFormat& format : import_formats()) {
    const std::size_t known = known_keys(format, keys);
    if (known > most) best = &format;
    most = std::max(most, known);
  }
  return best;
}

absl::StatusOr<const ImportFormat*> format_of(const std::vector<ConfigKey>& keys, const std::string& name,
                                              const std::string& format) {
  for (const ImportFormat& each : import_formats())
    if (each.name == format) return &each;
  if (!format.empty())
    return make_error(ExitCode::kUsage,
                      "there is no format " + quoted_text(format) + hint_of_names(format, import_format_names()));
  if (const ImportFormat* found = detect(keys)) return found;
  return make_error(ExitCode::kConfig, name +
                                           ":1:1: no key of this file is one of DeepSpeed's, Accelerate's or FSDP's. "
                                           "hint: --format says which kind of file it is");
}

nlohmann::json whole(const ImportSession& session) {
  nlohmann::json root = nlohmann::json::object();
  for (const auto& [pointer, value] : session.settings()) root[nlohmann::json::json_pointer(pointer)] = value;
  return root;
}

/// A number whose default depends on the rule stays where the session set it: the file is right for other versions' defaults too.
std::string without_defaults(const Strategy& strategy, const ImportSession& session) {
  Json root = Json::object();
  for (const StrategyKey& key : strategy_keys()) {
    Json value = key.field.get(strategy);
    const bool is_written = key.rules_default ? session.is_set(key.pointer) : value != Json::parse(key.default_json);
    if (is_written) root[Json::json_pointer(key.pointer)] = std::move(value);
  }
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// Fates come in the order of the keys of the file; the strategy says whether they go together.
absl::Status add_strategy(const ImportSession& session, const std::string& name, TranslatedConfig& result) {
  const absl::StatusOr<Strategy> strategy = parse_strategy(whole(session).dump(), "the strategy of " + name);
  if (strategy.ok()) result.strategy = without_defaults(*strategy, session);
  if (strategy.ok() || !result.refused.empty()) return absl::OkStatus();
  return make_error(ExitCode::kConfig,
                    message_of(strategy.status()) +
                        "\nhint: these keys of the strategy contradict each other. Change what they come from in " +
                        name);
}

}  // namespace

std::size_t TranslatedConfig::count(Fate fate) const {
  return static_cast<std::size_t>(
      std::count_if(keys.begin(), keys.end(), [&](const KeyFate& key) { return key.fate == fate; }));
}

absl::StatusOr<TranslatedConfig> translate_config(const std::string& text, const std::string& name,
                                                  const std::string& format) {
  TESSERA_ASSIGN_OR_RETURN(const JsonNode root, parse(text, name));
  std::vector<ConfigKey> keys;
  collect_keys(root, "", keys);
  TESSERA_ASSIGN_OR_RETURN(const ImportFormat* kind, format_of(keys, name, format));
  for (ConfigKey& key : keys) key.name = kind->row_name(key.path);
  ImportSession session(std::move(keys));
  apply_rows(*kind, session);
  TranslatedConfig result = {kind->title, session.fates(), session.implied(), session.notes(), {}, ""};
  for (const KeyFate& key : result.keys)
    if (key.fate == Fate::kRefused) result.refused.push_back(key.path);
  TESSERA_RETURN_IF_ERROR(add_strategy(session, name, result));
  return result;
}

const std::vector<ImportFormat>& import_formats() {
  static const std::vector<ImportFormat> formats = {deepspeed_format(), accelerate_format(), fsdp_format()};
  return formats;
}

std::vector<std::string> import_format_names() {
  std::vector<std::string> names;
  for (const ImportFormat& format : import_formats()) names.push_back(format.name);
  return names;
}

}  // namespace tessera::app
