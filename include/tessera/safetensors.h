#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/engine.h"
#include "tessera/existing.h"
#include "tessera/tensor_names.h"

namespace tessera {

/// Functions that exchange weights with other programs as safetensors (https://github.com/huggingface/safetensors), the
/// format that `transformers` reads and writes. The files hold only parameters and buffers. To continue a training
/// later, save it with save_checkpoint (checkpoint.h).
///
///   tessera::import_safetensors(engine, "llama/", {});                  // names are the module's own
///   tessera::export_safetensors(engine, "out/", {.names = [](const std::string& name) {
///     return tessera::NameInFile{{"model." + name}};
///   }});

/// The options by which import_safetensors finds a module's tensors in a file.
struct ImportOptions {
  TensorNames names = {};  ///< name in the file for each tensor; empty: the name in the module
  /// Tensors of the file that the module need not have. The names may contain `*` and `?` as file names do. The log
  /// names the ignored tensors.
  std::vector<std::string> ignored = {};
};

/// Gives an Engine's parameters and buffers the values of a safetensors file, or of a folder with `model.safetensors`
/// or `model.safetensors.index.json`. Files in F32, BF16, F16 and F64 fit every precision. Masters get the values of
/// the file, and parameters get the values that an update would compute from these masters. Optimizer states stay as
/// they are. The file may have a tied parameter under one of its names, or under several names with the same bits.
///
/// The call is collective and is made between steps. Only rank 0 reads. It sends about a MiB at a time to the other
/// ranks, so a rank needs about one MiB of memory in addition to its shards. If a tensor must be transposed, rank 0
/// holds the whole tensor. Links are not followed, and nothing outside the folder is opened.
///
/// Throws tessera::Error, the same on every rank: 66 if there is no such file or folder; 65 if the file is damaged, is
/// not in the format safetensors (the message has a hint for pickles such as .pt), or belongs to another model (the
/// message names every tensor that is missing, superfluous or of another shape or type); 74 if a read failed; 77
/// without permission; 64 between backward and step, or under Gathered. After an error nothing has changed, unless the
/// message says otherwise.
void import_safetensors(Engine& engine, const std::filesystem::path& path, const ImportOptions& options = {});

/// Loads into a module that has no Engine. The module's tensors keep their dtypes. It is not collective. After a failed
/// read (74), some tensors have the values of the file and others do not.
void import_safetensors(torch::nn::Module& module, const std::filesystem::path& path,
                        const ImportOptions& options = {});

/// The options with which export_safetensors writes a model.
struct ExportOptions {
  /// name in the file for each tensor, as in ImportOptions; a name that occurs twice is an error (64)
  TensorNames names = {};
  /// dtype of floating-point tensors in the file; empty: the dtype in which the Engine computes
  std::optional<DType> dtype = {};
  /// bytes of data in one file; a larger model gets several files and an index
  std::int64_t most_bytes = 5'000'000'000;
  Existing existing = Existing::kKept;  ///< what happens to a model that is in the folder already
};

/// Writes the full weights of the Engine's module into `folder`, which it creates: `model.safetensors`, or several
/// files and `model.safetensors.index.json`. A tied parameter is written once, under its first name. Buffers come from
/// rank 0. Parameters in F32 have their exact values in the file. Parameters of a narrower type have the values with
/// which forward computes.
///
/// The call is collective and is made between steps. Units are gathered one after another, and rank 0 writes each unit
/// when it has been gathered. Files get their names when all files are complete. Throws tessera::Error on all ranks: 73
/// if a file cannot be created; 74 if a write failed; 77 without permission (the Engine can continue after these); 64
/// in the cases of import_safetensors.
void export_safetensors(Engine& engine, const std::filesystem::path& folder, const ExportOptions& options = {});

}  // namespace tessera
