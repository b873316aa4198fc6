#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Reads a file of torch.save, of save_weights or of `torch.save(model.state_dict(), path)`: a zip archive of a pickle, which says what each
/// tensor is, and of a record for each storage. Nothing is trusted: no tensor reaches beyond its storage, no storage beyond its record, and no
/// record is larger than the file. Tensors of one storage share memory, and lie on the CPU.
/// Errors: 66 missing, 77 no permission, 65 no such file, or damaged, with the tensor's name.
absl::StatusOr<std::vector<std::pair<std::string, at::Tensor>>> read_weights(const std::filesystem::path& path);

}  // namespace tessera
