#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// A tensor of a file, before its values are read.
struct StoredTensor {
  std::string type;                                 ///< as the file calls it: "BF16", "BFloat16Storage"
  std::optional<c10::ScalarType> scalar_type = {};  ///< nothing: one that no module here has
  std::vector<std::int64_t> sizes = {};
};

/// The tensors of files of weights, whatever kind they are of: by name, and with values that are read in portions. What
/// the files say has been compared with what they hold, so a tensor that is here can be read, unless the disk fails or
/// somebody writes the file.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  virtual const std::map<std::string, StoredTensor>& tensors() const = 0;
  /// What stands among the tensors and is none, and what it is: {"epoch", "a number"}.
  virtual const std::vector<std::pair<std::string, std::string>>& others() const = 0;
  /// What the files hold beside the part that was chosen, by keys: "optimizer".
  virtual const std::vector<std::string>& unused() const = 0;

  /// Elements [first, first + numel) of a tensor whose elements are counted in rows: [numel], on the CPU, in the file's
  /// type. It may be a view of memory that other tensors have too, so it is for reading. REQUIRES: there is such a
  /// tensor, with such elements.
  virtual absl::StatusOr<at::Tensor> read(const std::string& name, std::int64_t first, std::int64_t numel) = 0;
};

}  // namespace tessera
