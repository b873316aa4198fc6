#include "runtime/config/json_differences.h"

namespace tessera {
namespace {

constexpr std::size_t kMostDifferences = 5;

}  // namespace

std::string text_of_json(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<std::string> differences(const nlohmann::json& mine, const nlohmann::json& rank_0s) {
  const nlohmann::json left = mine.flatten(), right = rank_0s.flatten();
  std::vector<std::string> found;
  const auto add = [&](const std::string& key) {
    const auto text = [&](const nlohmann::json& side) {
      return side.contains(key) ? text_of_json(side[key]) : "nothing";
    };
    found.push_back(key + ": " + text(left) + ", rank 0 has " + text(right));
  };
  for (const auto& [key, value] : left.items())
    if (!right.contains(key) || right[key] != value) add(key);
  for (const auto& [key, value] : right.items())
    if (!left.contains(key)) add(key);
  if (found.size() <= kMostDifferences) return found;
  const std::size_t more = found.size() - kMostDifferences;
  found.resize(kMostDifferences);
  found.push_back("and " + std::to_string(more) + " more");
  return found;
}

}  // namespace tessera
