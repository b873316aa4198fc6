#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"

namespace tessera {

/// Opens safetensors files as a TensorSource: a file, a folder or an index, as TensorFiles reads them
/// (checkpoint/tensor_files.h). The files may be hostile. They have one set of tensors and no parts. Errors: those of
/// TensorFiles, with `who` in front; those of choose_part.
absl::StatusOr<std::unique_ptr<TensorSource>> open_safetensors(const std::string& path, const std::string& who,
                                                               const WeightsRequest& request = {});

}  // namespace tessera
