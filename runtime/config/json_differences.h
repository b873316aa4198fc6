#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera {

/// What a rank has otherwise than rank 0, for messages: "/strategy/optimizer/lr: 0.002, rank 0 has 0.001", one text a key that
/// differs; at most five, and how many more.
std::vector<std::string> differences(const nlohmann::json& mine, const nlohmann::json& rank_0s);

/// On one line. Bytes that are no UTF-8 are replaced.
std::string text_of_json(const nlohmann::json& value);

}  // namespace tessera
