#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/json_document.h"

namespace tessera::app {

/// What became of a key of another program's file.
enum class Fate {
  kMapped,   ///< the strategy says the same
  kIgnored,  ///< training is the same without it
  kRefused,  ///< training would be another without it, and the strategy cannot say it
};

/// A key that holds a value. Objects hold keys, and are none; an empty object is one.
struct ConfigKey {
  std::string path;  ///< as the file has it: "fsdp_config.fsdp_version"
  std::string name;  ///< as rows call it: "fsdp.version"
  const JsonNode* node = nullptr;
};

struct KeyFate {
  std::string path;
  std::string value;  ///< as JSON, cut where it is long
  Fate fate = Fate::kIgnored;
  std::string text;  ///< "strategy = \"FULL_SHARD\"", or why it was ignored or refused
  std::size_t offset = 0;
};

/// A key of the strategy that no key of the file says, because the other program's default is not Tessera's.
struct ImpliedSetting {
  std::string pointer;
  nlohmann::json value;
  std::string why;
};

/// One file on its way to a strategy. Rows (import_rows.h) look at its keys, say what becomes of each, once, and set keys of the
/// strategy. What a row needs to know of other keys it looks up, so the order of keys in the file does not matter.
class ImportSession {
 public:
  explicit ImportSession(std::vector<ConfigKey> keys) : keys_(std::move(keys)) {}

  const std::vector<ConfigKey>& keys() const { return keys_; }
  /// The value of the key that rows call `name`; null where the file has none, or says null.
  const JsonNode* find(const std::string& name) const;
  bool is_on(const std::string& name) const;    ///< it is there, and true
  bool is_auto(const std::string& name) const;  ///< it is there, and "auto"

  void mapped(const ConfigKey& key, std::string text) { decide(key, Fate::kMapped, std::move(text)); }
  void ignored(const ConfigKey& key, std::string why) { decide(key, Fate::kIgnored, std::move(why)); }
  void refused(const ConfigKey& key, std::string why) { decide(key, Fate::kRefused, std::move(why)); }

  /// Sets a key of the strategy and says so in the words of `key`, with `more` behind them; a value outside of what the key
  /// allows is refused instead. Returns whether it was set.
  bool put(const ConfigKey& key, const std::string& pointer, nlohmann::json value, const std::string& more = "");
  /// Sets a key of the strategy that no key of the file says, unless it was set before.
  void imply(const std::string& pointer, nlohmann::json value, std::string why);
  /// Sets a key of the strategy, as part of a setting that put or imply announced.
  void set(const std::string& pointer, nlohmann::json value) { settings_[pointer] = std::move(value); }
  void note(std::string text) { notes_.push_back(std::move(text)); }

  bool is_set(const std::string& pointer) const { return settings_.count(pointer) > 0; }
  const std::map<std::string, nlohmann::json>& settings() const { return settings_; }
  const std::vector<KeyFate>& fates() const { return fates_; }
  const std::vector<ImpliedSetting>& implied() const { return implied_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void decide(const ConfigKey& key, Fate fate, std::string text);

  std::vector<ConfigKey> keys_;
  std::map<std::string, nlohmann::json> settings_;  ///< by pointer
  std::vector<KeyFate> fates_;
  std::vector<ImpliedSetting> implied_;
  std::vector<std::string> notes_;
};

/// Values as the programs themselves read them: Accelerate takes "true", "no" and "3" for a flag and a number too.
nlohmann::json json_of(const JsonNode& node);
std::optional<bool> bool_of(const JsonNode& node);
std::optional<double> number_of(const JsonNode& node);
std::optional<std::int64_t> integer_of(const JsonNode& node);
/// Lower case; empty for what is no text.
std::string word_of(const JsonNode& node);
/// The texts of a list, or of "a, b".
std::optional<std::vector<std::string>> names_of(const JsonNode& node);

/// "optimizer.lr = 0.001".
std::string setting_text(const std::string& pointer, const nlohmann::json& value);

}  // namespace tessera::app
