#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// What a file of weights holds: dictionaries, lists and modules, one in another, with tensors as leaves. Who makes a
/// tree keeps to the bounds below, so it may be walked by recursion.
struct WeightsNode {
  static constexpr int kDeepest = 32;                         ///< dictionaries in dictionaries
  static constexpr std::size_t kMost = std::size_t{1} << 20;  ///< nodes of a file

  enum class Kind : std::uint8_t { kOther, kTensor, kDictionary, kList, kModule };

  std::string name = {};  ///< under which the node above has it; empty: the whole file
  Kind kind = Kind::kOther;
  std::size_t tensor = 0;                 ///< of kTensor: which one of the file's
  std::string what = {};                  ///< of kOther: "a number"
  std::vector<WeightsNode> entries = {};  ///< of dictionaries, lists and modules, in their order
};

}  // namespace tessera
