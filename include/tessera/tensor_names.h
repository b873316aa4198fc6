#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// What a tensor of a module is called in another program's file, and how it lies there.
struct NameInFile {
  std::vector<std::string> names = {};  ///< the first one is written; of those that a file has, the first one is read
  bool transposed = false;              ///< of a matrix: the file has rows and columns exchanged
  /// Further names under which a file may have the same tensor once more: the head of a model that ties it to the embedding. Where
  /// the values are others, the import is an error.
  std::vector<std::string> copies = {};
};

/// For each parameter and buffer of a module, by its name there: "blocks.0.mlp.up.weight".
using TensorNames = std::function<NameInFile(const std::string& name)>;

}  // namespace tessera
