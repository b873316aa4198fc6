#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"
#include "runtime/base/input_file.h"

namespace tessera {

/// Opens a file that PyTorch wrote. It is a zip archive of a pickle, which describes each tensor (weights_pickle.h),
/// and of a record for each storage. Python's torch.save writes such files, and so do C++'s torch::save and
/// torch::pickle_save, and save_weights in both forms.
///
/// LibTorch's reader of the archive is the only foreign code that reads the file. Everything else is checked: no tensor
/// reaches beyond its storage, no storage beyond its record, and records together are no larger than the file. A
/// storage is read when a tensor of it is read; at most two of them are in memory.
///
/// Errors (65) begin with a verb ("is cut short ..."), so that the file's name can stand in front: no archive of
/// PyTorch, damaged, a TorchScript program, and those of choose_part. They name the tensor where they are about one.
absl::StatusOr<std::unique_ptr<TensorSource>> open_archive(InputFile file, const WeightsRequest& request);

}  // namespace tessera
