#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// Does the generated schema allow the document? "" or what the validator (valijson) says.
std::string schema_errors(const nlohmann::json& document);

}  // namespace tessera
