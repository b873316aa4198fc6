#pragma once

namespace tessera {

/// The fate of an existing file that an output would replace.
enum class Existing {
  kKept,      ///< the file stays, and an error names it
  kReplaced,  ///< replaced atomically once the new file is complete
};

}  // namespace tessera
