#pragma once

#include <string_view>

namespace tessera {

/// Returns whether an error's text already contains a remedy. If it does, callers that pass the error on add no remedy
/// of their own.
inline bool has_hint(std::string_view text) { return text.find("hint: ") != std::string_view::npos; }

}  // namespace tessera
