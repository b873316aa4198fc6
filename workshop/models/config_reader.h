#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/process/diagnostics.h"
#include "runtime/config/json_document.h"
#include "workshop/models/config_fields.h"

namespace tessera::models {

/// Reads the members of one flat JSON object into variables, one call for each key, and collects the errors. `finish`,
/// after the last key, reports the keys that no call asked for.
///
///     ConfigReader reader(root, diagnostics);
///     reader.needed_word("model", {"gpt", "llama"});
///     visit_fields(config, reader);
///     reader.finish();
class ConfigReader final : public ConfigVisitor {
 public:
  /// REQUIRES: `root` is an object; both outlive the reader. `place` is the JSON pointer of the object.
  ConfigReader(const JsonNode& root, Diagnostics& diagnostics, std::string place = "")
      : root_(root), diagnostics_(diagnostics), place_(std::move(place)) {}

  void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char* doc) override;
  void number(const std::string& key, double& value, const NumberRule& rule, const char* doc) override;
  void boolean(const std::string& key, bool& value, const char* doc) override;
  void word(const std::string& key, std::string& value, const std::vector<std::string>& allowed,
            const char* doc) override;
  /// Returns a word that the file must give; "" if it gives none of `allowed`.
  std::string needed_word(const std::string& key, const std::vector<std::string>& allowed);

  /// Checks a rule between keys. If the rule does not hold, an error is reported at `key`, unless one of `keys` already
  /// has an error.
  void require(bool holds, const std::string& key, const std::vector<std::string>& keys, const std::string& message);
  /// Reports the keys that no call asked for.
  void finish();
  /// Returns the keys that no call asked for.
  std::vector<std::string> unknown() const;

 private:
  const JsonNode* find(const std::string& key, bool required);
  void wrong(const std::string& key, const std::string& message);
  void read_word(const JsonNode& node, const std::string& key, std::string& value,
                 const std::vector<std::string>& allowed);

  const JsonNode& root_;
  Diagnostics& diagnostics_;
  const std::string place_;
  std::vector<std::string> known_;
};

}  // namespace tessera::models
