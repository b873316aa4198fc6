#pragma once

#include <string>

namespace tessera {

/// Warns unless this process has warned with the same `key` before: ranks may be threads of one process, and a cause
/// that they share is reported once. It is thread-safe.
void warn_once(const std::string& key, const std::string& message);

}  // namespace tessera
