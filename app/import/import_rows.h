#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/import/import_session.h"

namespace tessera::app {

/// What Tessera makes of another program's configuration, as tables: one row a key. A key is added by adding a row, and is then
/// in the command, in the list of known keys, and in docs/import-config.md.

struct ImportRow {
  /// As ConfigKey::name. "amp.*" stands for all keys below "amp" that have no row of their own.
  std::string name;
  std::string doc;  ///< what becomes of it, for the page
  /// Says what becomes of the key: calls mapped, ignored, refused or put, once. It gets no null, and no "auto".
  std::function<void(ImportSession&, const ConfigKey&)> apply;
  std::string shown = name;  ///< as the file has it, for the page and for messages
};

/// Whatever it says, training is the same.
ImportRow ignores(std::string name, std::string why);
/// `value` is what Tessera does anyway, and `why` says so; any other value is refused.
ImportRow expects(std::string name, nlohmann::json value, std::string why, std::string refusal);
/// A number, or a list of two: a key of the strategy says the same.
ImportRow sets(std::string name, std::string pointer);
/// A section that does something only where its key "enabled" is true, which is refused. `section` without ".*".
ImportRow switched_off(std::string section, std::string refusal);
/// A section that is refused whole.
ImportRow refuses(std::string name, std::string refusal);
/// What takes more than a value.
ImportRow by_rule(std::string name, std::string doc, std::function<void(ImportSession&, const ConfigKey&)> rule);

/// A kind of file.
struct ImportFormat {
  std::string name;   ///< of --format
  std::string title;  ///< "a DeepSpeed configuration"
  std::vector<ImportRow> rows;
  std::function<std::string(const std::string&)> row_name;  ///< from ConfigKey::path to ConfigKey::name
  std::function<void(ImportSession&)> finish;               ///< after all rows: what the file leaves to defaults
};

/// The row of a key: that of its name, else that of the narrowest section. Null: the key is unknown.
const ImportRow* row_of(const std::vector<ImportRow>& rows, const std::string& name);
/// Lets its row, or the rule for "auto", null and unknown keys, decide every key of the session.
void apply_rows(const ImportFormat& format, ImportSession& session);

std::vector<ImportRow> operator+(std::vector<ImportRow> a, std::vector<ImportRow> b);

}  // namespace tessera::app
