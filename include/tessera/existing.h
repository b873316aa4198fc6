#pragma once

namespace tessera {

/// The treatment of an existing file at the path of an output.
enum class Existing {
  kKept,      ///< the file stays, and an error names it
  kReplaced,  ///< the file is replaced atomically, as soon as the new file is complete
};

}  // namespace tessera
