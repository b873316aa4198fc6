#pragma once

#include <optional>

#include "tessera/checkpoint.h"

namespace tessera {

class Engine;

/// With `"durable": {"every": K, "dir": D}` in the strategy: every K steps, all that training goes on from is on this host's disk, and a
/// run that ended at any moment, by kill -9 or a power loss too, goes on from the last such step, bit for bit.
///
///   const auto resumed = tessera::resume_durable(engine);   // in every run, before its first step
///   if (resumed) batches.resume(*resumed->items.data);
///   for (...) {
///     ... engine.backward(loss);
///     engine.step();
///     tessera::commit_durable(engine, {.data = batches.cursor()});   // after every step: does something after each K-th
///   }
///   tessera::finish_commit(engine);
///
/// What lies on disk anyway (`"offload"`) is not written again: a commit says where it is, and until the next one it is not overwritten,
/// for which it has a second place. What lies in memory is written to D. A commit holds what a checkpoint holds (save_checkpoint), in the
/// form that training has it: it is for the same model, strategy and number of ranks, on the same hosts. A checkpoint loads anywhere.
///
/// What changes in the strategy from run to run without a word: learning rate, schedule, weight decay, clipping and the like come from
/// the new one, as with a checkpoint; rates and options set by hand, and a dynamic loss scale, from the commit.
///
/// Each rank has files of its own in D, rank-NNNNN.*, and `tessera-durable-*` in the directories of offload.paths.

/// After each `every`-th step (StepResult::step) begins a commit; else does nothing. Returns whether it began one. `items`: rank 0's count,
/// and every rank gets them back.
///
/// A thread writes it beside the next forward and backward, from the memory that training has. Before the next update, or whatever else
/// changes training state, the ranks wait until it is on the disk of them all; with optimizer.in_backward before the next backward. D's
/// first commit is there when this returns.
///
/// Collective; between steps. Errors, the same on every rank: 64 as save_checkpoint, and where D holds a step of an earlier run from which
/// this run did not go on; and those of the commit before, which this call is the first to tell: 73, 74, 77 a file could not be written.
/// Then the commit before that one stays the last; where it was a write or a sync that failed, so do all later ones of this run. Training
/// can go on. An Engine's destructor waits for a commit under way, and logs its error, which ends tessera::run with its exit code.
bool commit_durable(Engine& engine, const CheckpointItems& items = {});

/// Waits until the commit under way is on the disk of all ranks, and throws its error. Collective; between steps.
void finish_commit(Engine& engine);

/// Goes on from the last commit in D: parameters, optimizer states, step counts, loss scale, rates and options set by hand, buffers,
/// LibTorch's generator (a GPU's too), and the items. Nothing where D never held one: a D whose commits are all damaged or gone is an error
/// (65) of the Engine's constructor. LoadedCheckpoint::path is D.
///
/// Collective; before this run's first commit. Errors, the same on every rank: 64 out of turn, or without `"durable"`; 65 a file is
/// damaged; 74 one cannot be read.
std::optional<LoadedCheckpoint> resume_durable(Engine& engine);

}  // namespace tessera
