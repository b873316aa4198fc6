#pragma once

namespace tessera {

/// What becomes of a file that an output would replace.
enum class Existing {
  kKept,      ///< it is an error that names the file
  kReplaced,  ///< in one moment, once the new file is complete
};

}  // namespace tessera
