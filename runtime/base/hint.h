#pragma once

#include <string_view>

namespace tessera {

/// Whether the text of an error says already what to do, so that whoever hands it on adds no remedy of their own.
inline bool has_hint(std::string_view text) { return text.find("hint: ") != std::string_view::npos; }

}  // namespace tessera
