#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/weights/weights_tree.h"

namespace tessera {

/// A tensor as a pickle of PyTorch describes it: a view of a storage, whose values are a record of the archive. What it
/// says has not been compared with the record yet.
struct PickledTensor {
  std::string record;              ///< "data/0" is the record "0" here
  std::string type;                ///< "FloatStorage", or of types without a storage class "float8_e4m3fn"
  std::int64_t storage_numel = 0;  ///< elements; bytes if is_untyped
  bool is_untyped = false;
  std::int64_t offset = 0;  ///< in elements
  std::vector<std::int64_t> sizes, strides;
};

/// What `data.pkl` of an archive holds.
struct PickledWeights {
  WeightsNode root;  ///< a dictionary, a list or a module
  std::vector<PickledTensor>
      tensors;              ///< WeightsNode::tensor counts these; one that stands at two places is there once
  bool is_program = false;  ///< TorchScript: modules with code, as torch.jit.save writes them
};

/// Reads `data.pkl` of an archive: of torch.save in Python (dictionaries and lists, such as `model.state_dict()`), of
/// torch::save in C++ (a module, or tensors) or of torch::pickle_save. It makes tensors, numbers, texts and containers,
/// runs nothing, and takes memory and time in proportion to the text. It is free of LibTorch. Errors (65): cut short,
/// an instruction that PyTorch does not write, something else than a container, more nodes than WeightsNode has.
absl::StatusOr<PickledWeights> read_weights_pickle(std::string_view pickle);

}  // namespace tessera
