#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// The errors of the validator (valijson) for a document under the generated schema; empty where the schema allows it.
std::string schema_errors(const nlohmann::json& document);

}  // namespace tessera
