#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// Returns the errors that the validator (valijson) finds in a document with the generated schema. The text is empty if
/// the document is allowed.
std::string schema_errors(const nlohmann::json& document);

}  // namespace tessera
