#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <memory>
#include <string>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"
#include "runtime/base/input_file.h"

namespace tessera {

/// Opens the path that a user gives load_weights. The content decides how it is read:
///
/// | path                                                                    | is read as               |
/// |-------------------------------------------------------------------------|--------------------------|
/// | an archive of torch.save, torch::save or save_weights                   | open_archive reads it    |
/// | a safetensors file                                                      | open_safetensors does    |
/// | `*.index.json` of a model in several files, which are all of one kind   | those files              |
/// | a folder with model.safetensors or pytorch_model.bin, or an index of it | that file or those files |
///
/// Messages begin with the path. Errors: 66 if the file is missing; 77 without permission; 71 if memory or file
/// descriptors run out; 74 if a read fails; 65 if the file is damaged, or is of another kind (the message names the
/// kind and a remedy); and those of choose_part.
absl::StatusOr<std::unique_ptr<TensorSource>> open_weights(const std::filesystem::path& path,
                                                           const WeightsRequest& request);

/// Opens safetensors files as a TensorSource: a file, a folder or an index, as TensorFiles reads them
/// (checkpoint/tensor_files.h). The files may be hostile. They have one set of tensors and no parts. Errors: those of
/// TensorFiles, with `who` in front; those of choose_part.
absl::StatusOr<std::unique_ptr<TensorSource>> open_safetensors(const std::string& path, const std::string& who,
                                                               const WeightsRequest& request = {});

/// Opens a file that PyTorch wrote. It is a zip archive of a pickle, which describes each tensor (weights_pickle.h),
/// and of a record for each storage. Python's torch.save writes such files, and so do C++'s torch::save and
/// torch::pickle_save, and save_weights in both forms.
///
/// LibTorch's reader of the archive is the only foreign code that reads the file. Its results are checked: no tensor
/// reaches beyond its storage, no storage beyond its record, and records together are no larger than the file. A
/// storage is read when a tensor of it is read; at most two of them are in memory.
///
/// Errors: 65 if the file is no archive of PyTorch, is damaged, or is a TorchScript program; 71 if memory runs out;
/// those of choose_part. An error's text begins with a verb ("is cut short ..."), so that callers can put the file's
/// name in front of the text. If the error is about a tensor, the text begins with the tensor's name.
absl::StatusOr<std::unique_ptr<TensorSource>> open_archive(InputFile file, const WeightsRequest& request);

}  // namespace tessera
