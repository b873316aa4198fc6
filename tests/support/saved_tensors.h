#pragma once

#include <map>
#include <string>

namespace tessera::testing {

/// Returns every byte that a checkpoint has of parameters, by "what|name", whichever file has it.
std::map<std::string, std::string> tensors_of(const std::string& path);

}  // namespace tessera::testing
