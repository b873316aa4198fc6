#pragma once

#include <optional>

#include "tessera/checkpoint.h"

namespace tessera {

class Engine;

/// Durable steps: with `"durable": {"every": K, "dir": D}` in the strategy, everything that training needs to continue
/// is on this host's disk after every K-th step. A run that ended at any moment, also by kill -9 or a power loss, goes
/// on from the last such step, bit for bit.
///
///   const auto resumed = tessera::resume_durable(engine);   // in every run, before its first step
///   if (resumed) batches.resume(*resumed->items.data);
///   for (...) {
///     ... engine.backward(loss);
///     engine.step();
///     tessera::commit_durable(engine, {.data = batches.cursor()});   // after every step; every K-th begins a commit
///   }
///   tessera::finish_commit(engine);
///
/// State that lies on disk anyway (`"offload"`) is not written again. A commit records where this state lies. That
/// place is not overwritten until the next commit, since the state has a second place on the disk. State in memory is
/// written to D. A commit holds what a checkpoint holds (save_checkpoint), in the form in which training has it. A
/// commit therefore serves the same model, strategy and number of ranks, on the same hosts. A checkpoint loads
/// anywhere.
///
/// Some keys of the strategy may change from run to run: learning rate, schedule, weight decay, clipping and the like
/// come from the new strategy, as with a checkpoint. Rates and options set by hand, and a dynamic loss scale, come from
/// the commit.
///
/// Each rank has files of its own: rank-NNNNN.* in D, and `tessera-durable-*` in the directories of offload.paths.

/// Starts a commit after each `every`-th step (StepResult::step), and returns true; otherwise does nothing and returns
/// false. `items`: those of rank 0 are stored, and resume_durable gives them to every rank.
///
/// A thread writes the commit beside the next forward and backward, straight from training's memory. The ranks wait
/// until the commit is on the disk of all of them before the next update, or before anything else changes training
/// state; with optimizer.in_backward before the next backward. D's first commit is complete when this returns.
///
/// The call is collective and is made between steps. Errors (tessera::Error), the same on every rank: 64 in the cases
/// of save_checkpoint, and where D holds a step of an earlier run from which this run did not go on. It also throws the
/// error of the previous commit, which is reported here first: 73, 74, 77 a file could not be written. The commit
/// before the failed one then stays the last commit. If a write or a sync failed, all later commits of this run fail
/// too. Training can go on. An Engine's destructor waits for a commit under way and logs its error, which ends
/// tessera::run with its exit code.
bool commit_durable(Engine& engine, const CheckpointItems& items = {});

/// Waits until the commit under way is on the disk of all ranks, and throws its error (see commit_durable). The call is
/// collective and is made between steps.
void finish_commit(Engine& engine);

/// Goes on from the last commit in D: parameters, optimizer states, step counts, loss scale, rates and options set by
/// hand, buffers, LibTorch's generator (also the GPU's), and the items. LoadedCheckpoint::path is D. Returns nothing
/// where D never held a commit. A D whose commits are all damaged or gone is an error (65) of the Engine's constructor
/// instead.
///
/// The call is collective and is made before this run's first commit. Errors (tessera::Error), the same on every rank:
/// 64 called too late, or without `"durable"`; 65 a file is damaged; 74 one cannot be read.
std::optional<LoadedCheckpoint> resume_durable(Engine& engine);

}  // namespace tessera
