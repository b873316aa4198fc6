#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/weights/weights_tree.h"

namespace tessera {

/// A tensor as a pickle of PyTorch describes it: a view of a storage. The values of the storage are a record of the
/// archive. The description was not yet compared with the record.
struct PickledTensor {
  std::string record;              ///< name of the record; "0" means "data/0"
  std::string type;                ///< "FloatStorage", or "float8_e4m3fn" for a type without a storage class
  std::int64_t storage_numel = 0;  ///< number of elements of the storage; number of bytes if is_untyped
  bool is_untyped = false;
  std::int64_t offset = 0;  ///< number of elements of the storage before the tensor's first element
  std::vector<std::int64_t> sizes, strides;
};

/// The content of an archive's `data.pkl`.
struct PickledWeights {
  WeightsNode root;  ///< a dictionary, a list or a module
  /// WeightsNode::tensor is an index into this vector. A tensor that occurs at two places is in the vector once.
  std::vector<PickledTensor> tensors;
  bool is_program = false;  ///< whether the root is TorchScript: modules with code, as torch.jit.save writes them
};

/// Reads an archive's `data.pkl`, written by torch.save in Python (dictionaries and lists, such as
/// `model.state_dict()`), by torch::save in C++ (a module, or tensors) or by torch::pickle_save. The reader makes
/// tensors, numbers, texts and containers, and executes no code. It takes memory and time in proportion to the pickle's
/// length. It does not use LibTorch. Errors: 65 if the pickle is cut short, has an instruction that PyTorch does not
/// write, is not a container, or has more nodes than WeightsNode allows.
absl::StatusOr<PickledWeights> read_weights_pickle(std::string_view pickle);

}  // namespace tessera
