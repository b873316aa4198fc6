#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files/regular_file.h"
#include "checkpoint/tensor_header.h"

namespace tessera {

/// The tensors of a model that another program wrote as safetensors files:
///
/// | path                                             | is read as                                             |
/// |--------------------------------------------------|--------------------------------------------------------|
/// | a file                                           | a safetensors file                                     |
/// | a folder with `model.safetensors`                | that file                                              |
/// | a folder with `model.safetensors.index.json`     | the files of this folder that its `weight_map` names   |
/// | a file `*.index.json`                            | the files of its folder that its `weight_map` names    |
///
/// The files may be damaged or hostile. Every header is checked before anything is read; no link is followed, and
/// nothing outside of the folder is opened.
///
/// Messages begin with `who`. Errors: 66 if there is no such file or folder, or no safetensors file in it; 65 if a file
/// is not a safetensors file (for pickles, .pt and .bin files the message has a hint), if an index names a file outside
/// of its folder, or if a tensor is in two files or in none; those of RegularFile.
class TensorFiles {
 public:
  /// Opens a file, a folder or an index, and reads all headers.
  static absl::StatusOr<TensorFiles> open(const std::string& path, const std::string& who);

  /// A tensor, and the file in which it lies.
  struct Place {
    std::size_t file = 0;
    FileTensor tensor;
  };
  /// Returns the tensors by their names.
  const std::map<std::string, Place>& tensors() const { return tensors_; }

  /// Reads bytes of a tensor from byte `first` on, as many as fit into `bytes`. REQUIRES: the tensor has these bytes.
  absl::Status read(const Place& place, std::int64_t first, std::span<std::byte> bytes);

 private:
  struct File {
    std::string path;
    std::int64_t data_begin = 0;  ///< offset of the data from the beginning of the file, in bytes
    std::int64_t bytes = 0;
  };
  explicit TensorFiles(std::string who) : who_(std::move(who)) {}
  absl::Status add_file(const std::string& path);
  absl::Status add_indexed(const std::string& folder, const std::string& index);

  std::string who_;
  std::vector<File> files_;
  std::map<std::string, Place> tensors_;
  std::optional<RegularFile> open_file_;  ///< the file that was read last
};

inline constexpr char kModelFile[] = "model.safetensors";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";
inline constexpr char kIndexSuffix[] = ".index.json";

/// Returns the index of a model in several files: the names of tensors, each with the name of its file in the index's
/// folder. The names of files may not lead out of the folder. Messages begin with `who`. Errors: 65 if the file is not
/// such an index, or names a file outside of its folder; those of RegularFile.
absl::StatusOr<std::map<std::string, std::string>> read_model_index(const std::string& path, const std::string& who);

}  // namespace tessera
