#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera::models {

/// Reads the members of one flat JSON object into variables, one call a key, and collects what is wrong. After the last
/// key, `finish` reports the keys that nobody asked for.
///
///     ConfigReader reader(root, diagnostics);
///     reader.integer("layers", config.layers, {.required = true, .least = 1});
///     reader.boolean("bias", config.bias);
///     reader.finish();
class ConfigReader {
 public:
  struct IntegerRule {
    bool required = false;
    std::int64_t least = 0;
    std::int64_t most = std::int64_t{1} << 40;
  };
  struct NumberRule {
    double least = 0.0;
    double below = 1e30;          ///< least <= value < below
    bool least_excluded = false;  ///< least < value < below
  };

  /// REQUIRES: `root` is an object; both outlive the reader.
  ConfigReader(const JsonNode& root, Diagnostics& diagnostics) : root_(root), diagnostics_(diagnostics) {}

  void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule);
  void number(const std::string& key, double& value, const NumberRule& rule);
  void boolean(const std::string& key, bool& value);
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
