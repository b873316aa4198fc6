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

/// Weights of other programs, as safetensors (https://github.com/huggingface/safetensors): the format that
/// `transformers` reads and writes. The files hold parameters and buffers alone; save_checkpoint (checkpoint.h) is for
/// runs that go on with training.
///
///   tessera::import_safetensors(engine, "llama/", {});                  // names are the module's own
///   tessera::export_safetensors(engine, "out/", {.names = [](const std::string& name) {
///     return tessera::NameInFile{{"model." + name}};
///   }});

/// The way in which import_safetensors finds a module's tensors in a file.
struct ImportOptions {
  TensorNames names = {};  ///< name in the file for each tensor; empty: the module's own name
  /// Tensors of the file that the module need not have; `*` and `?` as in file names. The log names the ignored
  /// tensors.
  std::vector<std::string> ignored = {};
};

/// Gives an Engine's parameters and buffers the values of a safetensors file, or of a folder with `model.safetensors`
/// or `model.safetensors.index.json`. Files in F32, BF16, F16 and F64 fit every precision: masters get the file's
/// values, and parameters get what an update would make of these values. Optimizer states stay as they are. The file
/// may have a tied parameter under one of its names, or under several names with the same bits.
///
/// The call is collective and is made between steps. Rank 0 alone reads, and sends about a MiB at a time to the ranks,
/// so no rank holds more than that beside its shards. Rank 0 holds a whole tensor if that tensor must be transposed.
/// Links are not followed, and nothing outside the folder is opened.
///
/// Errors (tessera::Error), the same on every rank: 66 no such file or folder; 65 it is damaged, it is no safetensors
/// (pickles such as .pt are refused with a hint), or it belongs to another model (the message names every tensor that
/// is missing, superfluous or of another shape or type); 74 a read failed; 77 no permission; 64 between backward and
/// step, or under Gathered. Nothing has changed then, unless the message says otherwise.
void import_safetensors(Engine& engine, const std::filesystem::path& path, const ImportOptions& options = {});

/// Loads into a module that has no Engine. The module's tensors keep their dtypes. It is not collective. After a failed
/// read (74) some tensors have the file's values.
void import_safetensors(torch::nn::Module& module, const std::filesystem::path& path,
                        const ImportOptions& options = {});

/// The way in which export_safetensors writes a model.
struct ExportOptions {
  /// name in the file for each tensor, as in ImportOptions; a name that occurs twice is an error (64)
  TensorNames names = {};
  /// dtype of floating-point tensors in the file; empty: the dtype that the Engine computes with
  std::optional<DType> dtype = {};
  /// bytes of data in one file; a larger model gets several files and an index
  std::int64_t most_bytes = 5'000'000'000;
  Existing existing = Existing::kKept;  ///< what happens to a model that is in the folder already
};

/// Writes the full weights of the Engine's module into `folder`, which it creates: `model.safetensors`, or several
/// files and `model.safetensors.index.json`. A tied parameter is written once, under its first name. Buffers come from
/// rank 0. Parameters in F32 have their exact values in the file; parameters of a narrower type have what forward
/// computes with.
///
/// The call is collective and is made between steps. Units are gathered one after the other, and rank 0 writes them as
/// they come. Files get their names when all are complete. Errors (tessera::Error) on all ranks: 73 a file cannot be
/// created, 74 a write failed, 77 no permission (the Engine can go on then); 64 in the cases of import_safetensors.
void export_safetensors(Engine& engine, const std::filesystem::path& folder, const ExportOptions& options = {});

}  // namespace tessera
