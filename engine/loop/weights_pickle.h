#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// A tensor as a pickle of torch.save describes it: a view of a storage, whose values are a record of the archive. What it says has not been
/// compared with the record yet.
struct PickledTensor {
  std::string record;              ///< "data/0" is the record "0" here
  std::string type;                ///< "FloatStorage", or of types without a storage class "float8_e4m3fn"
  std::int64_t storage_numel = 0;  ///< elements; bytes if is_untyped
  bool is_untyped = false;
  std::int64_t offset = 0;  ///< in elements
  std::vector<std::int64_t> sizes, strides;
};

/// What a dictionary from names to tensors holds, in its order.
struct PickledWeights {
  std::vector<std::pair<std::string, PickledTensor>> tensors;
  std::vector<std::string> others;  ///< entries that are no tensor: "epoch: a number"
};

/// Reads `data.pkl` of an archive of torch.save, of a dict or an OrderedDict such as `model.state_dict()` returns. It makes tensors,
/// numbers, texts and containers, runs nothing, and takes memory and time in proportion to the text.
/// Errors (65): cut short, an instruction that torch.save does not write, something else than a dictionary.
absl::StatusOr<PickledWeights> read_weights_pickle(std::string_view pickle);

}  // namespace tessera
