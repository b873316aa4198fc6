#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// Returns the validator's (valijson) errors for a document under the generated schema; empty if it is allowed.
std::string schema_errors(const nlohmann::json& document);

}  // namespace tessera
