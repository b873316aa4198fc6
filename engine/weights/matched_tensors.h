#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/weights/tensor_source.h"
#include "tessera/safetensors.h"

namespace tessera {

/// A tensor of a module that is to get its values from a file.
struct WantedTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  c10::ScalarType type = c10::kFloat;
  std::vector<std::string> aliases = {};  ///< further names of a tied parameter
};

/// The rules by which names of a module are matched with names in its files.
struct MatchRules {
  TensorNames names = {};                 ///< ImportOptions::names
  std::vector<std::string> ignored = {};  ///< ImportOptions::ignored
  /// Makes the hint for names that do not fit. `wanted`: the names that the files should have, in the model's order;
  /// `in_file`: the names that they have.
  std::function<std::string(const std::vector<std::string>& wanted, const std::vector<std::string>& in_file)> hint = {};
};
/// Returns the rules that a program's options ask for.
MatchRules rules_of(const ImportOptions& options);

/// The tensor of the files that has a wanted tensor's values.
struct MatchedTensor {
  std::string name;  ///< name of the tensor in the files
  std::vector<std::int64_t> sizes = {};
  bool transposed = false;  ///< whether the file has the transposed tensor
};

/// The result of match_tensors.
struct MatchedTensors {
  std::vector<MatchedTensor> tensors;  ///< one entry for each wanted tensor, in the same order
  std::string unused;                  ///< `2 are not used: "a", "b"`; empty if all are used
};

/// Finds the file's tensor for each wanted tensor. Any floating-point type fits any other; other types fit only
/// themselves. The function fails with error 65 if the files do not fit. The error names every tensor that is missing
/// or superfluous, has another shape or type, or has two names with different values. A superfluous name is no error if
/// MatchRules::ignored allows it. The function also returns errors of reading, since a tensor with two names is read
/// and compared.
absl::StatusOr<MatchedTensors> match_tensors(TensorSource& source, const std::vector<WantedTensor>& wanted,
                                             const MatchRules& rules);

/// Reads a whole tensor, with the module's shape and the file's dtype, on the CPU.
absl::StatusOr<at::Tensor> read_whole(TensorSource& source, const MatchedTensor& matched);

}  // namespace tessera
