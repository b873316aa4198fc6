#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/import/import_session.h"

namespace tessera::app {

inline constexpr std::size_t kMostConfigBytes = std::size_t{1} << 18;
inline constexpr std::size_t kMostConfigValues = 500;  ///< some four times the largest file that people have

/// What became of another program's configuration.
struct TranslatedConfig {
  std::string title;          ///< "a DeepSpeed configuration"
  std::vector<KeyFate> keys;  ///< every key of the file once, in its order
  std::vector<ImpliedSetting> implied;
  std::vector<std::string> notes;
  std::vector<std::string> refused;  ///< paths of the keys that were
  std::string
      strategy;  ///< a strategy file of the keys that differ from their defaults, in the order of docs/strategy.md

  std::size_t count(Fate fate) const;
};

/// Translates the text of a file. `name` stands for the file in messages, and its end (".json", ".yaml") says how it is read; else the text
/// does. `format` is a name of import_formats(), or empty: the keys tell. Errors (78) are about what cannot be read at all; about a file of no
/// known kind; and about a strategy that would contradict itself, unless a key was refused anyway. All are listed at once.
absl::StatusOr<TranslatedConfig> translate_config(const std::string& text, const std::string& name,
                                                  const std::string& format = "");

/// The names of all formats, for --format.
std::vector<std::string> import_format_names();

}  // namespace tessera::app
