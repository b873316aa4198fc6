#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/config_fields.h"
#include "runtime/base/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera::models {

/// Reads the members of one flat JSON object into variables, one call a key, and collects what is wrong. After the last
/// key, `finish` reports the keys that nobody asked for.
///
///     ConfigReader reader(root, diagnostics);
///     reader.word("model", {"gpt", "llama"});
///     visit_fields(config, reader);
///     reader.finish();
class ConfigReader final : public ConfigVisitor {
 public:
  /// REQUIRES: `root` is an object; both outlive the reader.
  ConfigReader(const JsonNode& root, Diagnostics& diagnostics) : root_(root), diagnostics_(diagnostics) {}

  void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char* doc) override;
  void number(const std::string& key, double& value, const NumberRule& rule, const char* doc) override;
  void boolean(const std::string& key, bool& value, const char* doc) override;
  /// One of the words of `allowed`; "" if the file gives none of them.
  std::string word(const std::string& key, const std::vector<std::string>& allowed);

  /// A rule between keys: reported at `key` unless one of `keys` is wrong already.
  void require(bool holds, const std::string& key, const std::vector<std::string>& keys, const std::string& message);
  void finish();

 private:
  const JsonNode* find(const std::string& key, bool required);
  void wrong(const std::string& key, const std::string& message);

  const JsonNode& root_;
  Diagnostics& diagnostics_;
  std::vector<std::string> known_;
};

}  // namespace tessera::models
