#pragma once

#include <string>

namespace tessera::models {

/// Returns the reference page of the model file, in Markdown, made from visit_fields. It is committed as
/// docs/models.md. A test compares this file with the result. `tessera_model_docs docs` writes the file.
std::string model_reference();

/// These functions return the model files that the page shows and that a test reads, one of each kind.
std::string gpt_example();
std::string llama_example();

}  // namespace tessera::models
