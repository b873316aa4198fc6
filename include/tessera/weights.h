#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <type_traits>

#include "tessera/engine.h"
#include "tessera/existing.h"

namespace tessera {

/// Writes the full weights of the Engine's module: parameters and buffers by name, in one dictionary, in the format of
/// torch.save; Python's `torch.load(path, weights_only=True)` reads it too. For weights to be used, not for going on
/// training: parameters are in their compute dtype, and the optimizer's state is not in it. Buffers are rank 0's.
///
/// Collective, between steps. Rank 0 writes. Units are gathered one after the other and written as they come, so memory
/// holds one unit beside the plan, on every rank. A tied parameter is written once. The file appears when it is complete
/// and on the disk, so an earlier one of the same name is whole until then ("<path>.partial" is what is being written).
///
/// Throws tessera::Error on all ranks where rank 0 cannot write: 73 cannot be created; or a file of the name is there and to
/// be kept, and then the weights stay in "<path>.partial"; 74 a failed write or a full disk; 77 no permission. The Engine can
/// go on then.
void save_weights(Engine& engine, const std::filesystem::path& path, Existing existing = Existing::kReplaced);

/// Gives `module` the values and dtypes of a file of save_weights, or of `torch.save(model.state_dict(), path)` in Python. Before an Engine
/// is made of it, or under Gathered(kWrite); rank 0's values are then everybody's. All of the file is used, or nothing is changed.
///
/// Throws tessera::Error: 66 if the file is missing, 77 without permission; 65 if it is no regular file, no file of weights or damaged,
/// or, with all names, if it does not fit the module.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path);

/// For a ModuleHolder such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
void load_weights(const Holder& holder, const std::filesystem::path& path) {
  load_weights(static_cast<torch::nn::Module&>(*holder.ptr()), path);
}

}  // namespace tessera
