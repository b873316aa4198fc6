#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/token_options.h"

namespace tessera {

class Engine;

/// What a checkpoint holds beside an Engine.
struct CheckpointItems {
  std::map<std::string, at::Tensor> tensors;  ///< rank 0's; of numbers or bools, dense, of any device
  std::map<std::string, std::string> json;    ///< rank 0's; each a JSON text
  std::optional<SamplerCursor> data;  ///< TokenBatches::cursor, taken after the last microbatch that was trained on
};

struct SaveOptions {
  /// So many checkpoints stay in the folder, the oldest go; 0: all stay. Their files are removed beside training, before the next save, or
  /// finish_checkpoint.
  std::int64_t keep = 0;
  /// `folder`/best names this one from now on, which stays, whatever `keep` says, until another one is the best.
  bool is_best = false;
};

/// A save that goes on beside training (`"checkpoint": {"async": true}`).
struct CheckpointProgress {
  std::string path;          ///< of the checkpoint, once it is committed
  std::int64_t step = 0;     ///< that it holds
  std::int64_t written = 0;  ///< bytes of this rank's file
  std::int64_t bytes = 0;    ///< that the file will have, beside its head
};

/// What load_checkpoint found.
struct LoadedCheckpoint {
  std::string path;
  std::int64_t step = 0;  ///< StepResult::step of the last step that it holds
  CheckpointItems items;  ///< the same on every rank
  /// What is not as it was when the checkpoint was saved, each in a sentence: states that had to be rounded or that begin anew,
  /// generators of ranks or GPUs that there were not, noise that another version of Tessera made otherwise. Empty where nothing was lost.
  std::vector<std::string> inexact;
};

/// Writes all that training goes on from to a new folder in `folder`, whose path it returns, and makes `folder`/latest name it:
///
///   tessera::save_checkpoint(engine, "runs/a/checkpoints", {.data = batches.cursor()}, {.keep = 3});
///   ...
///   auto loaded = tessera::load_checkpoint(engine, "runs/a/checkpoints");   // in another process, on other ranks
///   batches.resume(*loaded.items.data);
///
/// Holds parameters and fp32 masters, optimizer states as they are stored (of frozen parameters that trained before, too), how often each parameter was updated, the loss scale,
/// rates and options set by hand, the module's buffers, LibTorch's default generators of each rank, and `items`. docs/checkpoints.md
/// is the format. Each rank writes its own shards, through 8 MiB of memory. At any moment, through errors and kills, `latest`
/// names a whole checkpoint, if there was one. All ranks must reach `folder`.
///
/// With `"checkpoint": {"async": true}` in the strategy it returns when this rank's shards are copied (MemoryCategory::kCheckpoint). A
/// thread writes the copy, and commits when all ranks have written theirs; the path is right from then on. The next step after the
/// end throws the error of a save that failed, on every rank, when the step itself is done: who catches it can go on. The next save,
/// load_checkpoint and Engine::set_trainable wait for the end, and throw it likewise. An Engine's destructor waits too, and logs it.
///
/// Collective; between steps. Errors, the same on every rank: 64 between backward and step, or under Gathered; 73, 74, 77 where
/// a file cannot be written (the message names the rank and the file). After those nothing has changed, and training can go on.
std::string save_checkpoint(Engine& engine, const std::filesystem::path& folder, const CheckpointItems& items = {},
                            const SaveOptions& options = {});

/// Waits until the save that goes on beside training is committed, and throws its error; does nothing where there is none. Waits until old
/// checkpoints are removed, too. Collective.
void finish_checkpoint(Engine& engine);

/// Of this rank, while a save goes on: until the step, finish_checkpoint or other call that has seen its end.
std::optional<CheckpointProgress> checkpoint_progress(Engine& engine);

/// Gives an Engine all that a checkpoint holds, at any number of ranks, under any strategy and precision, wherever state lies. With
/// the number of ranks, the units and the strategy of the save, training goes on as if it had not stopped, bit for bit. `path`: a
/// checkpoint, a folder with `latest`, or `folder`/best.
///
/// States of parameters that are frozen here stay in the host's memory until they train again, as with Engine::set_trainable.
///
/// What is not the model's is not loaded: learning rates of a schedule, clipping, sharding come from the Engine's strategy.
///
/// Collective; between steps. All files are checked before anything is changed. Errors, the same on every rank: 66 no checkpoint;
/// 65 it is damaged (with file, offset, wanted and got) or of another model or optimizer (with all names); 74 a file cannot be
/// read. If a message does not say so, the Engine is as it was.
LoadedCheckpoint load_checkpoint(Engine& engine, const std::filesystem::path& path);

}  // namespace tessera
