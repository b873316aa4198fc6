#pragma once

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

/// Weights of other programs, as safetensors (https://github.com/huggingface/safetensors): what `transformers` reads
/// and writes. They are parameters and buffers alone; save_checkpoint (checkpoint.h) is for going on with training.
///
///   tessera::import_safetensors(engine, "llama/", {});                  // names are the module's own
///   tessera::export_safetensors(engine, "out/", {.names = [](const std::string& name) {
///     return tessera::NameInFile{{"model." + name}};
///   }});

struct ImportOptions {
  TensorNames names = {};  ///< empty: a tensor has the module's name in the file
  /// Tensors of the file that the module need not have; `*` and `?` as in file names. The log names those that were not used.
  std::vector<std::string> ignored = {};
};

/// Gives an Engine's parameters and buffers the values of a safetensors file, or of a folder with `model.safetensors`
/// or `model.safetensors.index.json`. Files in F32, BF16, F16 and F64 fit every precision: masters get the file's
/// values, parameters what an update would make of them. Optimizer states stay as they are. The file may have a tied parameter under one
/// of its names, or under several with the same bits.
///
/// Collective; between steps. Rank 0 alone reads, and sends a MiB or so at a time to the ranks, so no rank holds more
/// than a portion beside its shards; rank 0 holds a whole tensor where that is transposed. Links are not followed, and
/// nothing outside of the folder is opened.
///
/// Errors, the same on every rank: 66 no such file or folder; 65 it is damaged, no safetensors (pickles such as .pt are
/// refused with a hint), or of another model: every tensor that is missing, superfluous or of another shape or type is
/// named; 74, 77. Nothing has changed then, unless the message says so. 64: between backward and step, or under
/// Gathered.
void import_safetensors(Engine& engine, const std::filesystem::path& path, const ImportOptions& options = {});

/// The same for a module without an Engine: its tensors keep their dtypes. After an error of reading (74), some have
/// the file's values.
void import_safetensors(torch::nn::Module& module, const std::filesystem::path& path,
                        const ImportOptions& options = {});

struct ExportOptions {
  TensorNames names = {};           ///< as ImportOptions'; the same name twice is an error (64)
  std::optional<DType> dtype = {};  ///< of floating tensors in the file; empty: each as the Engine computes with it
  std::int64_t most_bytes = 5'000'000'000;  ///< of one file's data; a larger model gets several files and an index
  Existing existing = Existing::kKept;      ///< what becomes of a model that is in the folder already
};

/// Writes the full weights of the Engine's module into `folder`, which is made: `model.safetensors`, or several files
/// and `model.safetensors.index.json`. A tied parameter is written once, under its first name. Buffers are rank 0's.
/// What is there with parameters in F32 is their exact value; with a narrower type, what the forward computes with.
///
/// Collective, between steps. Units are gathered one after the other and written by rank 0 as they come. Files get
/// their names when all are complete. Errors on all ranks: 73, 74, 77 (the Engine can go on then); 64 as above.
void export_safetensors(Engine& engine, const std::filesystem::path& folder, const ExportOptions& options = {});

}  // namespace tessera
