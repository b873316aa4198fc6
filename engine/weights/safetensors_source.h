#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>

#include "engine/weights/tensor_source.h"
#include "engine/weights/weights_part.h"

namespace tessera {

/// The tensors of safetensors files: of a file, a folder or an index, as TensorFiles reads them
/// (checkpoint/tensor_files.h), which may be hostile. Such files have one set of tensors and no parts. Errors:
/// TensorFiles', with `who` in front; choose_part's.
absl::StatusOr<std::unique_ptr<TensorSource>> open_safetensors(const std::string& path, const std::string& who,
                                                               const WeightsRequest& request = {});

}  // namespace tessera
