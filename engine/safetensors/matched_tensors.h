#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/tensor_files.h"
#include "tessera/safetensors.h"

namespace tessera {

/// A tensor of a module that is to get a file's values.
struct WantedTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  c10::ScalarType type = c10::kFloat;
  std::vector<std::string> aliases = {};  ///< further names of a tied parameter
};

/// Where its values are.
struct MatchedTensor {
  TensorFiles::Place place;
  bool transposed = false;
};

struct MatchedTensors {
  std::vector<MatchedTensor> tensors;  ///< one for each of those that are wanted
  std::string unused;                  ///< `2 are not used: "a", "b"`; empty: all are
};

/// 65 where the files do not fit, with every tensor that is missing, superfluous, or of another shape or type, or that the file has under
/// two names with different values: no tensor is passed over in silence. Floating types fit each other; other types fit themselves. Other
/// errors: of reading, which it does where a tensor is there twice.
absl::StatusOr<MatchedTensors> match_tensors(TensorFiles& files, const std::vector<WantedTensor>& wanted,
                                             const ImportOptions& options);

/// Elements [first, first + numel) of a tensor in the order of the file, in the file's type. REQUIRES: they are there.
absl::StatusOr<at::Tensor> read_elements(TensorFiles& files, const TensorFiles::Place& place, std::int64_t first,
                                         std::int64_t numel);

/// All of it, with the module's shape.
absl::StatusOr<at::Tensor> read_whole(TensorFiles& files, const MatchedTensor& matched);

}  // namespace tessera
