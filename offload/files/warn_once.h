#pragma once

#include <string>

namespace tessera {

/// Warns unless this process has already warned with the same `key`. So a cause that several ranks share is reported
/// once if these ranks are threads of one process. It is thread-safe.
void warn_once(const std::string& key, const std::string& message);

}  // namespace tessera
