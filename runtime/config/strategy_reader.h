#pragma once

#include <map>
#include <optional>
#include <string>

#include "runtime/base/process/diagnostics.h"
#include "runtime/config/json_document.h"
#include "runtime/config/strategy_table.h"

namespace tessera {

/// Fills a Strategy from a JSON tree by the rows of strategy_keys(). Use one object for one tree. Everything that is
/// wrong is reported to `diagnostics`. Use the strategy only if nothing was wrong.
///
/// The reader works in phases. First it checks values one by one (type, range, known key). If a key's value is right,
/// it then checks whether the key has an effect together with the other keys (Condition). Last, it checks the rules
/// between keys (StrategyRule). A rule is not checked if one of its keys was wrong already, so that one mistake gives
/// one message.
class StrategyReader {
 public:
  explicit StrategyReader(Diagnostics& diagnostics) : diagnostics_(diagnostics) {}

  Strategy read(const JsonNode& root);
  /// Checks a strategy that a program set field by field. It is no mistake if a field that the program set has no
  /// effect. In a file, a key without effect is a mistake.
  Strategy read_from_code(const JsonNode& root);

 private:
  void read_group(const JsonNode& node, const std::string& pointer);
  void read_member(const JsonNode& member, const std::string& group);
  void read_key(const StrategyKey& key, const JsonNode& node);
  void refuse_unknown(const JsonNode& member, const std::string& group);
  void check_conditions();
  void check_rules();
  bool any_wrong(const std::vector<std::string>& pointers) const;

  Diagnostics& diagnostics_;
  Strategy strategy_;
  std::map<std::string, std::size_t> given_;  ///< offset of the value of every known key and group in the file
};

/// The function below reads keys of earlier versions. This version still reads these keys, and the next version does
/// not. They are the methods of "compression", each of which was a key, and "delay_compensation" of "sync", which was a
/// number.

/// Rewrites old keys in `root` into the form of this version; each value keeps its place in the file. An old key that
/// has no new form, or is given beside its new form, is reported to `diagnostics`. The result is a warning that shows
/// the new form of these keys. It is empty if the file has no old key.
std::optional<std::string> renew_old_keys(JsonNode& root, Diagnostics& diagnostics, const std::string& file);

}  // namespace tessera
