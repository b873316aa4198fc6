#pragma once

#include <optional>

#include "tessera/checkpoint.h"

namespace tessera {

class Engine;

/// Durable steps: with `"durable": {"every": K, "dir": D}` in the strategy, everything that training needs to continue
/// is on this host's disk after every K-th step. A run that ended at any moment, also by kill -9 or a power loss,
/// continues from the last such step, bit for bit.
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
/// written to D. A commit holds the same things as a checkpoint (save_checkpoint), in the form in which training has
/// them. It can therefore be used only with the same model, strategy and number of ranks, on the same hosts. A
/// checkpoint can be loaded anywhere.
///
/// With "reproducible", a run on CPUs also continues from the commits of another number of ranks, with the same bits.
/// When the Engine is made, rank 0 makes a checkpoint of these commits in D/moved-commits, and removes the commits.
/// resume_durable loads the checkpoint, and the first commit of the new ranks removes it. If the run is killed at any
/// moment, the next run loses no step. Rank 0's D must hold the commits of all ranks, and every rank must see D; rank
/// 0's host needs the memory of all old ranks for a while. Otherwise, `tessera checkpoint from-commits` turns the
/// commits of `tessera train` into a checkpoint, and a program does so by resume_durable and then save_checkpoint, on
/// the old number of ranks.
///
/// Some keys of the strategy may change from run to run. Learning rate, schedule, weight decay, clipping and similar
/// keys come from the new strategy, as with a checkpoint. Rates and options set by hand, and a dynamic loss scale, come
/// from the commit.
///
/// Each rank has separate files: rank-NNNNN.* in D, and `tessera-durable-*` in the directories of offload.paths.

/// Starts a commit after each `every`-th step (StepResult::step), and returns true. After another step it returns
/// false; it may then complete the commit that is under way. The `items` of rank 0 are stored, and resume_durable gives
/// them to every rank.
///
/// A thread writes the commit directly from the memory of training, during the next forward and backward. Before the
/// next update, or any other change of training state, ranks wait until the commit is on the disks of all ranks. If
/// optimizer.in_backward is set, they wait before the next backward. The first commit of D is complete when this
/// function returns.
///
/// The call is collective and is made between steps. Throws tessera::Error, the same on every rank: 64 in the cases of
/// save_checkpoint, and if D holds a step of an earlier run from which this run did not continue. The call also throws
/// the error of the previous commit, if no call has thrown that error yet: 73, 74 or 77 if a file could not be written.
/// The commit before the failed commit then stays the last commit. If a write or a sync failed, all later commits of
/// this run fail too. Training can continue. An Engine's destructor waits for a commit under way and logs its error;
/// tessera::run then ends with the exit code of that error.
bool commit_durable(Engine& engine, const CheckpointItems& items = {});

/// Waits until the commit under way is on the disk of all ranks, and throws its error (see commit_durable). The call is
/// collective and is made between steps.
void finish_commit(Engine& engine);

/// Continues from the last commit in D. It restores parameters, optimizer states, step counts, the loss scale, rates
/// and options set by hand, buffers, LibTorch's generator (also that of the GPU), and the items. LoadedCheckpoint::path
/// is D, or the path of the checkpoint that was made of another number of ranks' commits. Returns nothing if D never
/// held a commit. If all commits of D are damaged or lost, the Engine's constructor throws Error (65) instead. It also
/// throws if commits of another number of ranks cannot be used: 65 without "reproducible", or for another model; 66 if
/// commits of some ranks are missing; 78 on a GPU, or for another processor.
///
/// The call is collective and is made before this run's first commit. Throws tessera::Error, the same on every rank: 64
/// if it is called too late, or without `"durable"`; 65 if a file is damaged; 74 if a file cannot be read; 78 for
/// another processor, as load_checkpoint.
std::optional<LoadedCheckpoint> resume_durable(Engine& engine);

}  // namespace tessera
