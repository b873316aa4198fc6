#pragma once

#include <map>
#include <string>

namespace tessera::testing {

/// Returns the bytes of all parameters in a checkpoint, whichever file they are in. The key is "what|name".
std::map<std::string, std::string> tensors_of(const std::string& path);

}  // namespace tessera::testing
