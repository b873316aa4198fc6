#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// A tensor of a file, before its values are read.
struct StoredTensor {
  std::string type;                                 ///< name of the type in the file, such as "BF16" or
                                                    ///< "BFloat16Storage"
  std::optional<c10::ScalarType> scalar_type = {};  ///< no value for a type that modules cannot have
  std::vector<std::int64_t> sizes = {};
};

/// Gives access to the tensors of weights files of any kind: by name, with values that are read in portions. The
/// declarations in the files were compared with their content. So every tensor that is listed can be read, unless the
/// disk fails or the file is changed during the call. One thread at a time uses it.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  /// Returns the entries that are not tensors, each with a description: {"epoch", "a number"}.
  const std::vector<std::pair<std::string, std::string>>& others() const { return others_; }
  /// Returns the keys in the files that do not belong to the chosen part, such as "optimizer".
  const std::vector<std::string>& unused() const { return unused_; }

  /// Reads elements [first, first + numel) of a tensor, counted row by row. The result is on the CPU, and has the shape
  /// [numel] and the file's type. It may share memory with other tensors, so it must not be written. Errors: 65 if the
  /// file is damaged; 71 if memory runs out; 74 if a read fails. REQUIRES: the tensor exists and has these elements.
  virtual absl::StatusOr<at::Tensor> read(const std::string& name, std::int64_t first, std::int64_t numel) = 0;

 protected:
  std::map<std::string, StoredTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> others_;
  std::vector<std::string> unused_;
};

}  // namespace tessera
