#pragma once

#include <string>

namespace tessera {

/// These functions make pages from strategy_keys(). The pages are committed as docs/strategy.schema.json and
/// docs/strategy.md, and a test compares them with the code. `tessera_strategy_docs docs` writes them.

/// Returns the JSON schema (draft 7). It says which values each key may have. It cannot express contradictions between
/// keys (see the reference page).
std::string strategy_schema();
/// Returns the text of the reference page in Markdown.
std::string strategy_reference();
/// Returns a strategy file that the page shows. A test reads this file.
std::string strategy_example();

}  // namespace tessera
