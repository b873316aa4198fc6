#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/engine.h"
#include "tessera/existing.h"

namespace tessera {

/// The form of the file that save_weights writes. The form decides how the file can be read; load_weights reads both
/// forms.
///
/// | form        | C++                         | Python                                                       |
/// |-------------|-----------------------------|--------------------------------------------------------------|
/// | kDictionary | load_weights                | `model.load_state_dict(torch.load(path, weights_only=True))` |
/// | kArchive    | `torch::load(module, path)` | `torch.jit.load(path).state_dict()`                          |
enum class WeightsForm {
  kDictionary,  ///< a dictionary from names to tensors, as torch.save of Python writes it
  /// The module's tree, as C++'s `torch::save(module, path)` writes it, by LibTorch's Module::save. A class that
  /// overrides save and load cannot load this file, since the class's own format is not written. Modules that aren't
  /// serializable (Functional) and undefined buffers are left out.
  kArchive,
};

/// Writes the full weights of the Engine's module into one file: parameters and buffers by name. The file is for using
/// the weights, not for continuing a training: parameters have their compute dtype, and the file does not have the
/// optimizer's state. Buffers come from rank 0.
///
/// The call is collective and must be made between steps. Rank 0 writes. Units are gathered and written one after
/// another. Memory therefore holds one unit in addition to the plan, on every rank and in both forms. A tied parameter
/// is written once. The file appears under its name when it is complete and on the disk. An earlier file of the same
/// name stays whole until then; the new file has the name "<path>.partial" meanwhile.
///
/// Throws tessera::Error on all ranks if rank 0 cannot write: 73 if the file cannot be created, or if a file of this
/// name exists and is to be kept (the weights then stay in "<path>.partial"); 74 after a failed write or if the disk is
/// full; 77 without permission. The Engine can continue to train after such an error.
void save_weights(Engine& engine, const std::filesystem::path& path, Existing existing = Existing::kReplaced);
/// Writes the weights in one of several forms.
void save_weights(Engine& engine, const std::filesystem::path& path, WeightsForm form,
                  Existing existing = Existing::kReplaced);

/// The options with which load_weights reads a file.
struct LoadOptions {
  /// Selects one of several dictionaries or modules in a file, by its keys joined with slashes, such as "ema" or
  /// "checkpoint/state_dict". An empty text selects the dictionary or module that has the module's names. An error
  /// lists the dictionaries or modules of the file if several of them have these names.
  std::string part = {};
  /// Pieces of names that are ignored in the file and in the module. Examples are "module." of DataParallel,
  /// "_orig_mod." of torch.compile, and a prefix such as "model.". A piece is ignored at the beginning of a name and
  /// behind a dot.
  std::vector<std::string> without = {};
  /// Names in the file that the module need not have. They may contain `*` and `?`, as patterns of file names do. The
  /// log lists the file's names that were not used.
  std::vector<std::string> ignored = {};
};

/// Gives `module` the values and dtypes of a file:
///
/// | file                                                     | written by                                      |
/// |----------------------------------------------------------|-------------------------------------------------|
/// | a dictionary of tensors, or one in other dictionaries    | save_weights; `torch.save(model.state_dict())`, |
/// |                                                          | `torch.save({"state_dict": ..., "epoch": 3})`   |
/// | a module, or tensors without names ("0", "1")            | save_weights; C++'s `torch::save`               |
/// | safetensors; a `*.index.json`, a folder with one of them | transformers, export_safetensors                |
/// | `pytorch_model.bin`, its index, a folder with one        | transformers                                    |
///
/// Call it before an Engine is made for the module, or under Gathered(kWrite); all ranks then get the values of rank 0.
/// The call is not collective. All tensors of the file must fit the module, except those that the options leave out;
/// otherwise nothing is changed. If dtypes are the same, values are written to the memory that the module has. You must
/// trust the file (SECURITY.md), unless it is a safetensors file.
///
/// Throws tessera::Error: 66 if the file is missing; 77 without permission; 65 if the file is damaged, does not fit the
/// module (the message has all names that differ), or is of another kind (a pickle of an old PyTorch, a TorchScript
/// program, HDF5, GGUF ...; the message names the kind and a remedy); 64 if the module has no memory yet
/// (deferred_init); load into the module's Engine then.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options = {});

/// Loads into a ModuleHolder, such as one made by TORCH_MODULE.
template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
void load_weights(const Holder& holder, const std::filesystem::path& path, const LoadOptions& options = {}) {
  load_weights(static_cast<torch::nn::Module&>(*holder.ptr()), path, options);
}

/// Loads into tensors of a program that has no module, by name. A tensor with two names is tied.
void load_weights(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const std::filesystem::path& path,
                  const LoadOptions& options = {});

/// Gives an Engine's parameters and buffers the values of a file of weights, in the dtypes of the strategy; masters get
/// the file's values. Optimizer states stay as they are.
///
/// The call is collective and must be made between steps. Only rank 0 reads the file. It sends about a MiB at a time to
/// the other ranks, so a rank needs about one MiB of memory in addition to its shards. Rank 0 also holds two of the
/// file's storages. Errors are those of the load_weights above, the same on every rank. After an error the Engine is
/// unchanged, unless the message says otherwise. Error 64 is also thrown between backward and step, and under Gathered.
void load_weights(Engine& engine, const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace tessera
