#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera {

/// Returns the differences between a rank's values and those of rank 0, for messages: "/strategy/optimizer/lr: 0.002,
/// rank 0 has 0.001". Each key that differs has one text. There are at most five such texts, and one text that says how
/// many more keys differ.
std::vector<std::string> differences(const nlohmann::json& mine, const nlohmann::json& rank_0s);

/// Returns a value as JSON on one line. Bytes that are no UTF-8 are replaced.
std::string text_of_json(const nlohmann::json& value);

}  // namespace tessera
