#include "tests/config/strategy_schema.h"

#include <valijson/adapters/nlohmann_json_adapter.hpp>
#include <valijson/schema.hpp>
#include <valijson/schema_parser.hpp>
#include <valijson/validator.hpp>

#include "runtime/config/strategy_docs.h"

namespace tessera {
namespace {

const valijson::Schema& schema() {
  static const valijson::Schema* const parsed = [] {
    auto* result = new valijson::Schema;
    const nlohmann::json text = nlohmann::json::parse(strategy_schema());
    valijson::SchemaParser(valijson::SchemaParser::kDraft7)
        .populateSchema(valijson::adapters::NlohmannJsonAdapter(text), *result);
    return result;
  }();
  return *parsed;
}

}  // namespace

std::string schema_errors(const nlohmann::json& document) {
  valijson::Validator validator;
  valijson::ValidationResults results;
  const valijson::adapters::NlohmannJsonAdapter adapter(document);
  if (validator.validate(schema(), adapter, &results)) return "";
  std::string text;
  valijson::ValidationResults::Error error;
  while (results.popError(error)) {
    for (const std::string& place : error.context) text += place;
    text += ": " + error.description + "\n";
  }
  return text;
}

}  // namespace tessera
