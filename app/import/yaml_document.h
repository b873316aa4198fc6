#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "runtime/base/diagnostics.h"
#include "runtime/config/json_document.h"

namespace tessera::app {

/// Reads YAML as the tree that parse_json gives, with the same bounds: kMaxJsonDepth, `most_values`, UTF-8, every key given once. Plain words
/// are what YAML 1.1 says, and so what Accelerate reads: `no` and `off` are false, `~` is null; numbers may also be written 1e-4. One document;
/// no aliases, which could name each other without end, and no tags.
std::optional<JsonNode> parse_yaml(const std::string& text, Diagnostics& diagnostics, std::size_t most_values);

}  // namespace tessera::app
