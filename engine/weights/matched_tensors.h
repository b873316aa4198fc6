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

/// A tensor of a module that is to get a file's values.
struct WantedTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  c10::ScalarType type = c10::kFloat;
  std::vector<std::string> aliases = {};  ///< further names of a tied parameter
};

/// How the names of a module and of its files go together.
struct MatchRules {
  TensorNames names = {};                 ///< ImportOptions::names
  std::vector<std::string> ignored = {};  ///< ImportOptions::ignored
  /// A hint for names that do not fit, of what the files' names would be in the model's order, and of those that the
  /// files have.
  std::function<std::string(const std::vector<std::string>& wanted, const std::vector<std::string>& in_file)> hint = {};
};
MatchRules rules_of(const ImportOptions& options);

/// Where its values are.
struct MatchedTensor {
  std::string name;  ///< in the files
  std::vector<std::int64_t> sizes = {};
  bool transposed = false;
};

struct MatchedTensors {
  std::vector<MatchedTensor> tensors;  ///< one for each of those that are wanted
  std::string unused;                  ///< `2 are not used: "a", "b"`; empty: all are
};

/// 65 where the files do not fit, with every tensor that is missing, superfluous, or of another shape or type, or that
/// the file has under two names with different values: nothing is passed over in silence. Floating types fit each
/// other; other types fit themselves. Other errors: of reading, which it does where a tensor is there twice.
absl::StatusOr<MatchedTensors> match_tensors(TensorSource& source, const std::vector<WantedTensor>& wanted,
                                             const MatchRules& rules);

/// All of it, with the module's shape.
absl::StatusOr<at::Tensor> read_whole(TensorSource& source, const MatchedTensor& matched);

}  // namespace tessera
