#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/base/text.h"
#include "runtime/config/strategy_reader.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

constexpr char kGroup[] = "/compression", kMethod[] = "method";

/// A key that "compression" had in version 0.1, and the new key in its place.
struct OldKey {
  const char* name;
  bool chooses;     ///< true if the key turned a method on; false if it was a number of a method
  const char* off;  ///< JSON: the value that had no effect
  /// Types of compression.method, with " or " between them. For "sign" this text is "sign_", and the old value
  /// completes the name.
  const char* types;
  const char* member;  ///< the member that has the value; null: the value chooses the type
};
constexpr OldKey kOldKeys[] = {{"power_sgd_rank", true, "0", "power_sgd", "rank"},
                               {"top_k", true, "0", "top_k", "fraction"},
                               {"random_k", true, "0", "random_k", "fraction"},
                               {"sign", true, R"("none")", "sign_", nullptr},
                               {"one_bit", true, "false", "one_bit", nullptr},
                               {"qsgd_levels", true, "0", "qsgd", "levels"},
                               {"terngrad", true, "false", "terngrad", nullptr},
                               {"hook", true, "false", "hook", nullptr},
                               {"top_k_momentum", false, "0", "top_k", "momentum"},
                               {"one_bit_momentum", false, "0", "one_bit", "momentum"},
                               {"seed", false, "0", "random_k or qsgd or terngrad", "seed"}};

const OldKey* find_old(const std::string& name) {
  const auto* const found = std::ranges::find(kOldKeys, name, &OldKey::name);
  return found == std::end(kOldKeys) ? nullptr : found;
}

nlohmann::ordered_json json_of(const JsonNode& node) {
  if (!node.is_object() && !node.is_list()) return node.value;
  nlohmann::ordered_json value = node.value;
  for (const JsonNode& child : node.children) {
    if (node.is_object())
      value[child.key] = json_of(child);
    else
      value.push_back(json_of(child));
  }
  return value;
}

JsonNode member_of(const JsonNode& old, const char* name) {
  return {name, old.key_offset, old.offset, old.value, old.children};
}

class Renewal {
 public:
  Renewal(JsonNode& compression, Diagnostics& diagnostics) : compression_(compression), diagnostics_(diagnostics) {}

  /// Returns the names of the old keys that were found.
  std::vector<std::string> run() {
    std::vector<JsonNode> kept;
    for (JsonNode& child : compression_.children) (find_old(child.key) ? old_ : kept).push_back(std::move(child));
    compression_.children = std::move(kept);
    std::vector<std::string> names;
    for (const JsonNode& each : old_) names.push_back(each.key);
    if (old_.empty()) return names;
    if (std::ranges::find(compression_.children, std::string(kMethod), &JsonNode::key) != compression_.children.end()) {
      refuse(old_.front(), "cannot stand beside \"method\", which took its place. [T0736] hint: leave it out");
      return names;
    }
    for (const bool chooses : {true, false}) {
      for (const JsonNode& each : old_) {
        const OldKey& key = *find_old(each.key);
        if (key.chooses != chooses) continue;
        if (chooses)
          choose(key, each);
        else
          add_member(key, each);
      }
    }
    if (chosen_) compression_.children.insert(compression_.children.begin(), std::move(method_));
    return names;
  }

 private:
  void refuse(const JsonNode& old, const std::string& message) {
    diagnostics_.add(old.offset, json_pointer(kGroup, old.key), message);
  }

  void choose(const OldKey& key, const JsonNode& old) {
    if (old.value == nlohmann::json::parse(key.off)) return;
    std::string type = key.types;
    if (!key.member) {
      const bool is_sign = old.value == "majority" || old.value == "feedback";
      if (old.key == "sign" && !is_sign)
        return refuse(old, "must be one of none, majority, feedback, got " + describe(old));
      if (old.key != "sign" && old.value != true) return refuse(old, "must be true or false, got " + describe(old));
      if (is_sign) type += old.value.get<std::string>();
    }
    if (chosen_) {
      return refuse(
          old, fmt::format("cannot stand beside {}: one method makes the sums. [T0550] hint: leave one of them out",
                           chosen_->key));
    }
    chosen_ = &old;
    method_ = member_of(old, kMethod);
    method_.value = nlohmann::json::object();
    method_.children = {member_of(old, kTypeKey)};
    method_.children[0].value = type_ = type;
    if (key.member) method_.children.push_back(member_of(old, key.member));
  }

  void add_member(const OldKey& key, const JsonNode& old) {
    if (chosen_ && fmt::format(" {} ", key.types).find(fmt::format(" {} ", type_)) != std::string::npos) {
      method_.children.push_back(member_of(old, key.member));
    } else if (old.value != 0) {
      refuse(old, fmt::format("{} has no effect: it needs compression.method of type {}. [T0737] hint: leave it out",
                              describe(old), key.types));
    }
  }

  JsonNode& compression_;
  Diagnostics& diagnostics_;
  std::vector<JsonNode> old_;
  const JsonNode* chosen_ = nullptr;  ///< points to an entry of old_
  std::string type_;
  JsonNode method_;
};

/// Rewrites "delay_compensation" of "sync". It once was a number, which is now its member "lambda".
std::optional<std::string> renew_delay_compensation(JsonNode& root, const std::string& file) {
  const auto sync = std::ranges::find(root.children, std::string("sync"), &JsonNode::key);
  if (!root.is_object() || sync == root.children.end() || !sync->is_object()) return std::nullopt;
  const auto found = std::ranges::find(sync->children, std::string("delay_compensation"), &JsonNode::key);
  if (found == sync->children.end() || !found->value.is_number()) return std::nullopt;
  JsonNode lambda = member_of(*found, "lambda");
  found->value = nlohmann::json::object();
  found->children = {std::move(lambda)};
  return fmt::format(
      "{}: /sync/delay_compensation: this version is the last that reads a number. [T0915] hint: write "
      "\"delay_compensation\": {}",
      file, json_of(*found).dump());
}

std::optional<std::string> renew_compression(JsonNode& root, Diagnostics& diagnostics, const std::string& file) {
  const auto group = std::ranges::find(root.children, std::string(kGroup + 1), &JsonNode::key);
  if (!root.is_object() || group == root.children.end() || !group->is_object()) return std::nullopt;
  const std::vector<std::string> names = Renewal(*group, diagnostics).run();
  if (names.empty()) return std::nullopt;
  const std::string now = json_of(*group).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  return fmt::format(
      "{}: /compression: this version is the last that reads {}. [T0738] hint: write \"compression\": {}", file,
      joined(names), now);
}

}  // namespace

std::optional<std::string> renew_old_keys(JsonNode& root, Diagnostics& diagnostics, const std::string& file) {
  const std::optional<std::string> delay = renew_delay_compensation(root, file);
  const std::optional<std::string> compression = renew_compression(root, diagnostics, file);
  if (!delay || !compression) return delay ? delay : compression;
  return *delay + "\n" + *compression;
}

}  // namespace tessera
