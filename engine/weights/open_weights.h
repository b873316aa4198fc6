#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <memory>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"

namespace tessera {

/// Opens the path that a user gives load_weights. The content decides how it is read:
///
/// | path                                                                    | is read as               |
/// |-------------------------------------------------------------------------|--------------------------|
/// | an archive of torch.save, torch::save or save_weights                   | weights_archive.h        |
/// | a safetensors file                                                      | safetensors_source.h     |
/// | `*.index.json` of a model in several files, which are all of one kind   | those files              |
/// | a folder with model.safetensors or pytorch_model.bin, or an index of it | that file or those files |
///
/// Errors, with the path in front: 66 if the file is missing; 77 without permission; 71 if memory or file descriptors
/// run out; 74 if a read fails; 65 if the file is damaged or of another kind, which is named with its remedy; and those
/// of choose_part.
absl::StatusOr<std::unique_ptr<TensorSource>> open_weights(const std::filesystem::path& path,
                                                           const WeightsRequest& request);

}  // namespace tessera
