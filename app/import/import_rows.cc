#include "app/import/import_rows.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "runtime/base/text.h"
#include "runtime/config/strategy_table.h"

namespace tessera::app {
namespace {

bool equals(const JsonNode& node, const nlohmann::json& value) {
  if (value.is_boolean()) return bool_of(node) == value.get<bool>();
  if (value.is_number()) return number_of(node) == value.get<double>();
  return word_of(node) == value.get<std::string>();
}

bool is_section_of(const std::string& name, const ImportRow& row) { return row.name.starts_with(name + "."); }

std::vector<std::string> shown_names(const std::vector<ImportRow>& rows) {
  std::vector<std::string> names;
  for (const ImportRow& row : rows)
    if (!row.shown.ends_with(".*")) names.push_back(row.shown);
  return names;
}

std::string unknown(const ImportFormat& format, const ConfigKey& key) {
  return "unknown key" + did_you_mean(key.path, shown_names(format.rows));
}

constexpr char kAuto[] = "\"auto\": left at Tessera's default";

void apply_row(const ImportFormat& format, ImportSession& session, const ConfigKey& key) {
  const ImportRow* row = row_of(format.rows, key.name);
  const bool names_section = std::any_of(format.rows.begin(), format.rows.end(),
                                         [&](const ImportRow& each) { return is_section_of(key.name, each); });
  if (row == nullptr && !names_section) return session.refused(key, unknown(format, key));
  if (key.node->value.is_null()) return session.ignored(key, "null: nothing is said");
  if (key.node->is_object() && names_section) return session.ignored(key, "an empty section: nothing is said");
  if (row == nullptr) return session.refused(key, "must be an object with keys of its own");
  if (word_of(*key.node) == "auto") return session.ignored(key, kAuto);
  row->apply(session, key);
}

std::string as_code(const nlohmann::json& value) { return "`" + value.dump() + "`"; }

}  // namespace

ImportRow ignores(std::string name, std::string why) {
  return {std::move(name), "ignored: " + why,
          [why](ImportSession& session, const ConfigKey& key) { session.ignored(key, why); }};
}

ImportRow expects(std::string name, nlohmann::json value, std::string why, std::string refusal) {
  std::string doc = as_code(value) + ": ignored, " + why + "; else refused: " + refusal;
  return {std::move(name), std::move(doc), [value, why, refusal](ImportSession& session, const ConfigKey& key) {
            if (equals(*key.node, value)) return session.ignored(key, why);
            session.refused(key, refusal);
          }};
}

ImportRow sets(std::string name, std::string pointer) {
  std::string doc = "`" + dotted(pointer) + "`";
  return {std::move(name), std::move(doc), [pointer](ImportSession& session, const ConfigKey& key) {
            nlohmann::json value = json_of(*key.node);
            if (const std::optional<double> number = number_of(*key.node)) value = *number;
            session.put(key, pointer, std::move(value));
          }};
}

ImportRow switched_off(std::string section, std::string refusal) {
  return {section + ".*", "ignored unless `enabled` is true; then refused: " + refusal,
          [section, refusal](ImportSession& session, const ConfigKey& key) {
            if (!session.is_on(section + ".enabled")) return session.ignored(key, section + " is not enabled");
            session.refused(key, key.name == section + ".enabled" ? refusal : "belongs to " + section);
          }};
}

ImportRow refuses(std::string name, std::string refusal) {
  return {std::move(name), "refused: " + refusal,
          [refusal](ImportSession& session, const ConfigKey& key) { session.refused(key, refusal); }};
}

ImportRow by_rule(std::string name, std::string doc, std::function<void(ImportSession&, const ConfigKey&)> rule) {
  return {std::move(name), std::move(doc), std::move(rule)};
}

const ImportRow* row_of(const std::vector<ImportRow>& rows, const std::string& name) {
  const ImportRow* found = nullptr;
  for (const ImportRow& row : rows) {
    if (row.name == name) return &row;
    const bool holds = row.name.ends_with(".*") && name.starts_with(row.name.substr(0, row.name.size() - 1));
    if (holds && (found == nullptr || row.name.size() > found->name.size())) found = &row;
  }
  return found;
}

void apply_rows(const ImportFormat& format, ImportSession& session) {
  std::set<std::string> seen;
  for (const ConfigKey& key : session.keys()) {
    if (!seen.insert(key.name).second)
      session.refused(key, "the file says this twice, under two names. Keep one of them");
    else
      apply_row(format, session, key);
  }
  format.finish(session);
  const bool has_auto = std::any_of(session.keys().begin(), session.keys().end(),
                                    [](const ConfigKey& key) { return word_of(*key.node) == "auto"; });
  if (has_auto)
    session.note(
        "What is \"auto\" is filled in by the training program, and left at Tessera's default here. TesseraTrainer "
        "takes "
        "accumulation, clipping, learning rate and schedule from TrainingArguments; the rest, such as mixed_precision, "
        "belongs into the strategy.");
}

std::vector<ImportRow> operator+(std::vector<ImportRow> a, std::vector<ImportRow> b) {
  a.insert(a.end(), std::make_move_iterator(b.begin()), std::make_move_iterator(b.end()));
  return a;
}

}  // namespace tessera::app
