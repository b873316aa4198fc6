#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "workshop/models/model_config.h"

namespace tessera::models {

/// The values that an integer of a model file may have: least <= value <= most.
struct IntegerRule {
  bool required = false;
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// The values that a number may have: least <= value < below, or least < value < below.
struct NumberRule {
  double least = 0.0;
  double below = 1e30;
  bool least_excluded = false;
};

/// Visits every key of a model file, one after the other. One visitor reads a file, another writes a file, and a third
/// makes the reference page, so a key that is added to `visit_fields` is added everywhere. `doc` is one sentence for
/// docs/models.md.
class ConfigVisitor {
 public:
  virtual ~ConfigVisitor() = default;
  virtual void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char* doc) = 0;
  virtual void number(const std::string& key, double& value, const NumberRule& rule, const char* doc) = 0;
  virtual void boolean(const std::string& key, bool& value, const char* doc) = 0;
  /// Visits a word that must be one of `allowed`.
  virtual void word(const std::string& key, std::string& value, const std::vector<std::string>& allowed,
                    const char* doc) = 0;
};

/// These functions show each field of a model's configuration to `visitor`, in the order of the reference page.
void visit_fields(GPTConfig& config, ConfigVisitor& visitor);
void visit_fields(LlamaConfig& config, ConfigVisitor& visitor);

/// A larger number of parameters is a typing error. All numbers of bytes fit into 64 bits up to this number.
inline constexpr double kMostParameters = 1e14;

}  // namespace tessera::models
