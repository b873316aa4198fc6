#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/tensor_header.h"
#include "offload/files/output_file.h"
#include "tessera/existing.h"

namespace tessera {

/// Writes a model as safetensors files into a folder, which it makes. There is only `model.safetensors`, unless this
/// file would have more than `most_bytes` of data. Then there are `model-00001-of-00003.safetensors` and so on, and
/// `model.safetensors.index.json`. Each file is written as "<name>.partial". When the data of all files is written,
/// each file in turn is synced and gets its name. The index gets its name last.
///
///   TESSERA_ASSIGN_OR_RETURN(auto writer, TensorFilesWriter::create(folder, tensors, most_bytes, existing, who));
///   for each tensor, in the order of `tensors`: writer.append(its bytes), in any portions
///   writer.finish()
///
/// Messages begin with `who`. Errors: 73 if the folder or a file cannot be created, or if the folder has a model that
/// must be kept; 74 if a write fails; 77 without permission. After an error, only the destructor may be called.
class TensorFilesWriter {
 public:
  /// Limit of a file's data, in bytes; the library transformers uses the same limit.
  static constexpr std::int64_t kMostBytes = 5'000'000'000;

  /// `tensors`: name, dtype and shape. A tensor is never cut. A tensor that is larger than `most_bytes` has a separate
  /// file.
  static absl::StatusOr<TensorFilesWriter> create(const std::string& folder, const std::vector<FileTensor>& tensors,
                                                  std::int64_t most_bytes, Existing existing, const std::string& who);

  /// Writes the next bytes of the data. The data consists of the tensors, one after another.
  absl::Status append(std::span<const std::byte> bytes);
  /// Completes all files. It fails with error 70 if the data does not have the length of the tensors.
  absl::Status finish();

 private:
  struct Part {
    std::string name;
    std::vector<FileTensor> tensors;
    std::int64_t bytes = 0;
  };
  TensorFilesWriter(std::string folder, std::vector<Part> parts, Existing existing, std::string who)
      : folder_(std::move(folder)), who_(std::move(who)), parts_(std::move(parts)), existing_(existing) {}
  static std::vector<Part> parts_of(const std::vector<FileTensor>& tensors, std::int64_t most_bytes);
  absl::Status open_next();
  absl::Status write_index();
  /// Returns the names of files of an earlier model, which would be mixed up with the new model.
  absl::StatusOr<std::vector<std::string>> model_files() const;

  std::string folder_, who_;
  std::vector<Part> parts_;
  Existing existing_;
  std::vector<OutputFile> files_;  ///< files that were begun; the last of them is being written
  std::int64_t left_ = 0;          ///< bytes that the last file still needs
};

}  // namespace tessera
