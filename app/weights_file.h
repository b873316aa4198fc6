#pragma once

#include <absl/status/status.h>
#include <torch/nn/module.h>

#include <filesystem>

#include "app/output_files.h"

namespace tessera {
class Engine;
}

namespace tessera::app {

/// A plain export of a model's weights: one dictionary from names to tensors, in the format of torch.save, so that
/// Python's `torch.load(path, weights_only=True)` reads it too. For weights to be used, not for going on training:
/// parameters are in their compute dtype, and the optimizer's state is not in it.

/// Collective: every rank calls it, rank 0 writes. Holds the whole model in memory on every rank, and a copy on rank 0.
/// The file appears when it is complete (write_output). Errors (73, 74, 77) are those of rank 0.
absl::Status save_weights(Engine& engine, torch::nn::Module& module, int rank, const std::filesystem::path& path,
                          Existing existing);

/// Gives `module` the file's values and dtypes. 66 if it is missing, 77 without permission; 65 if it is no regular file,
/// no file of weights, or, with all names, if it does not fit the module.
absl::Status load_weights(torch::nn::Module& module, const std::filesystem::path& path);

}  // namespace tessera::app
