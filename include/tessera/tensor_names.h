#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// The name of a module's tensor in another program's file, and how the tensor lies there.
struct NameInFile {
  /// the first name is written; on reading, the first name that the file has counts
  std::vector<std::string> names = {};
  bool transposed = false;  ///< true for a matrix: the file has rows and columns exchanged
  /// Further names under which a file may have the same tensor once more, such as the head of a model that ties it to
  /// the embedding. An import throws an error if the values there differ.
  std::vector<std::string> copies = {};
};

/// Returns the name in the file for each parameter and buffer of a module, given its name there:
/// "blocks.0.mlp.up.weight".
using TensorNames = std::function<NameInFile(const std::string& name)>;

}  // namespace tessera
