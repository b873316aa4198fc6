#pragma once

// See docs/glossary.md: unit.

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

/// The content of a checkpoint in addition to the Engine's own state. Rank 0's tensors and texts are saved; those of
/// other ranks are not.
struct CheckpointItems {
  /// tensors by name: dense, of numbers or bools, on any device; those of rank 0 are saved
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> json;  ///< JSON texts by name; those of rank 0 are saved
  /// position in the data: TokenBatches::cursor, taken after the last microbatch of the step
  std::optional<SamplerCursor> data;
};

/// The options of save_checkpoint for the checkpoints in the folder.
struct SaveOptions {
  /// The number of checkpoints that stay in the folder; the oldest ones are removed. 0 keeps all. Files are removed
  /// while training continues, at the latest by the next save or finish_checkpoint.
  std::int64_t keep = 0;
  /// True: `folder`/best names this checkpoint from then on. The checkpoint then stays, whatever `keep` says, until
  /// another one is the best.
  bool is_best = false;
};

/// The progress of an asynchronous save (`"checkpoint": {"async": true}`), on this rank.
struct CheckpointProgress {
  std::string path;          ///< path that the checkpoint has once it is committed
  std::int64_t step = 0;     ///< StepResult::step that the checkpoint holds
  std::int64_t written = 0;  ///< bytes of this rank's file that are written so far
  std::int64_t bytes = 0;    ///< bytes that this rank's file will have, without its header
};

/// The result of load_checkpoint.
struct LoadedCheckpoint {
  std::string path;       ///< folder of the checkpoint
  std::int64_t step = 0;  ///< StepResult::step of the last step that it holds
  CheckpointItems items;  ///< the same on every rank
  /// Sentences about the differences between the loaded state and the state at the moment of the save. For example,
  /// states may have been rounded, or may start anew. The saving run may not have had the generators of some ranks or
  /// GPUs. Another version of Tessera may have drawn noise differently. The list is empty if nothing was lost.
  std::vector<std::string> inexact;
};

/// Saves everything that training needs to continue in a new folder inside `folder`, and returns the new folder's path.
/// `folder`/latest names the new folder from then on:
///
///   tessera::save_checkpoint(engine, "runs/a/checkpoints", {.data = batches.cursor()}, {.keep = 3});
///   ...
///   auto loaded = tessera::load_checkpoint(engine, "runs/a/checkpoints");   // in another process, on other ranks
///   batches.resume(*loaded.items.data);
///
/// A checkpoint holds parameters and fp32 masters, and optimizer states as they are stored (also those of frozen
/// parameters that trained before). It holds the number of updates of each parameter, the loss scale, and rates and
/// options set by hand. It holds the module's buffers, the state of LibTorch's default generators on each rank, and
/// `items`. docs/checkpoints.md describes the format. Each rank writes its own shards through 8 MiB of memory. `latest`
/// names a complete checkpoint at any moment, even after errors and kills, as soon as there was a complete one. All
/// ranks must reach `folder`.
///
/// The strategy's `"checkpoint": {"async": true}` makes a save asynchronous: the call returns when this rank's shards
/// are copied (MemoryCategory::kCheckpoint). A thread writes the copy, and commits the checkpoint when all ranks have
/// written their copies. The returned path is valid from then on. If the save fails, the next step throws the error on
/// every rank, after the step itself is done. So a program that catches the error can continue. The next save,
/// load_checkpoint and Engine::set_trainable also wait for the end of the save, and throw its error. An Engine's
/// destructor waits too, and logs the error.
///
/// The call is collective and is made between steps, by the thread that drives the Engine. Throws tessera::Error, the
/// same on every rank: 64 between backward and step, or under Gathered; 73, 74 or 77 if a file cannot be written (the
/// message names the rank and the file). After such an error nothing has changed, and training can continue.
std::string save_checkpoint(Engine& engine, const std::filesystem::path& folder, const CheckpointItems& items = {},
                            const SaveOptions& options = {});

/// Waits until the asynchronous save is committed and old checkpoints are removed, and throws the save's error (see
/// save_checkpoint). It does nothing if no save is under way. It is collective.
void finish_checkpoint(Engine& engine);

/// Returns the progress of this rank's asynchronous save, or nothing if none is under way. A save counts as under way
/// until a step, finish_checkpoint or another call has noticed the end of the save. The call is not collective.
std::optional<CheckpointProgress> checkpoint_progress(Engine& engine);

/// Gives an Engine everything that a checkpoint holds. The number of ranks, the strategy, the precision and the
/// offloading of state may differ from those of the save. If the number of ranks, the units and the strategy are the
/// same, training continues as if it had not stopped, bit for bit. `path` is a checkpoint, a folder with `latest`, or
/// `folder`/best.
///
/// If parameters are frozen in this Engine, their states stay in the host's memory until the parameters train again, as
/// with Engine::set_trainable. The schedule's learning rates, clipping and sharding are not loaded: they come from the
/// Engine's strategy.
///
/// The call is collective and is made between steps. It checks all files before it changes anything. Throws
/// tessera::Error, the same on every rank: 66 if there is no checkpoint; 65 if the checkpoint is damaged (the message
/// has the file, the offset, and the expected and actual values) or belongs to another model or optimizer (the message
/// has all names that differ); 74 if a file cannot be read; 78 if both runs are "reproducible" and computed with
/// different threads or instructions, unless TESSERA_ALLOW_OTHER_PROCESSOR=1. After an error the Engine is unchanged,
/// unless the message says otherwise.
LoadedCheckpoint load_checkpoint(Engine& engine, const std::filesystem::path& path);

}  // namespace tessera
