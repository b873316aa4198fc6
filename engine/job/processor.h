#pragma once

#include <absl/status/statusor.h>

#include <optional>
#include <string>

#include "checkpoint/commit.h"
#include "checkpoint/manifest.h"
#include "engine/job/job.h"

namespace tessera {

// Operators of LibTorch may give other bits with another number of threads, and with other instructions. A run with
// "reproducible" therefore continues only on the processor with which it began, unless the user allows another one.

/// Returns the processor that a checkpoint or a commit of this run names: the number of threads (or the GPU) and the
/// instruction sets with which the calling thread computes now. Returns nothing if the strategy has no "reproducible".
std::optional<SavedProcessor> processor_to_save(const Job& job);

/// Throws tessera::Error (78), the same on all ranks, if ranks of a run with "reproducible" compute with different
/// processors. The message names both. Job::join calls it. It is collective over job.axes.control.
void expect_same_processor(const Job& job);

/// Decides whether a run with "reproducible" may continue from state that was made with the processor `saved`. `from`
/// is the folder of that state, the prefix of messages. Returns nothing if the processor is the same, or if the state
/// does not name one; rank 0 then logs that. Returns a sentence for LoadedCheckpoint::inexact if the processor differs
/// and the user allows that by TESSERA_ALLOW_OTHER_PROCESSOR=1. Error: 78, with both processors, if the user does not.
absl::StatusOr<std::optional<std::string>> other_processor(const std::optional<SavedProcessor>& saved, const Job& job,
                                                           const std::string& from);

/// Adds the processor that `processor_to_save` returns, if any, to the parts of a commit.
void add_processor(const Job& job, CommitParts& parts);
/// Returns the processor that a commit names, or nothing if it names none. Throws std::exception if `add_processor` did
/// not write the commit's part.
std::optional<SavedProcessor> processor_in(const CommitParts& parts);

}  // namespace tessera
