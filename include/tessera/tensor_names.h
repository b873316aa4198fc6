#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// The name of a module's tensor in another program's file, and how the file stores the tensor.
struct NameInFile {
  /// a save uses the first name; a load uses the first of these names that is in the file
  std::vector<std::string> names = {};
  bool transposed = false;  ///< whether the file has rows and columns exchanged; true only for a matrix
  /// Other names under which the file may contain the same tensor again. A model that ties its head to its embedding
  /// has two names, for example. An import throws an error if the values under these names differ.
  std::vector<std::string> copies = {};
};

/// Returns the name in the file of a parameter or buffer, given its name in the module: "blocks.0.mlp.up.weight".
using TensorNames = std::function<NameInFile(const std::string& name)>;

}  // namespace tessera
