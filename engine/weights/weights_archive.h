#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"
#include "runtime/base/input_file.h"

namespace tessera {

/// The tensors of a file that PyTorch wrote: a zip archive of a pickle, which says what each tensor is
/// (weights_pickle.h), and of a record for each storage. Python's torch.save writes such files, C++'s torch::save and
/// torch::pickle_save, and save_weights in both forms.
///
/// Nothing is trusted but LibTorch's reader of the archive: no tensor reaches beyond its storage, no storage beyond its
/// record, and records together are no larger than the file. A storage is read when a tensor of it is, and memory has
/// at most two of them.
///
/// Errors (65) begin with a verb ("is cut short ..."), so the file's name can stand in front: no archive of PyTorch,
/// damaged, a TorchScript program, choose_part's; with the tensor's name where it is about one.
absl::StatusOr<std::unique_ptr<TensorSource>> open_archive(InputFile file, const WeightsRequest& request);

}  // namespace tessera
