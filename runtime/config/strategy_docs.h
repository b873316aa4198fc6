#pragma once

#include <string>

namespace tessera {

/// Pages made from strategy_keys(): committed as docs/strategy.schema.json and docs/strategy.md, and compared
/// with the code by a test. `tessera_strategy_docs docs` writes them.

/// JSON schema (draft 7). It says what each key may hold; contradictions between keys are beyond it (see the
/// page).
std::string strategy_schema();
/// The reference page, in Markdown.
std::string strategy_reference();
/// A strategy file that the page shows, and that a test reads.
std::string strategy_example();

}  // namespace tessera
