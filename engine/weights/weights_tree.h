#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// A node of the tree that a weights file holds: nested dictionaries, lists and modules, with tensors as leaves. Code
/// that makes a tree keeps to the bounds below, so that other code may walk the tree by recursion.
struct WeightsNode {
  static constexpr int kDeepest = 32;                         ///< largest depth of containers inside containers
  static constexpr std::size_t kMost = std::size_t{1} << 20;  ///< largest number of nodes of a file

  enum class Kind : std::uint8_t { kOther, kTensor, kDictionary, kList, kModule };

  std::string name = {};  ///< key of this node in the node that contains it; empty for the whole file
  Kind kind = Kind::kOther;
  std::size_t tensor = 0;                 ///< kTensor: index of the tensor among the file's tensors
  std::string what = {};                  ///< kOther: a description, such as "a number"
  std::vector<WeightsNode> entries = {};  ///< entries of a dictionary, list or module, in order
};

}  // namespace tessera
