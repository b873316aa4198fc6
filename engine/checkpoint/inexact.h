#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

// Each function returns a line for LoadedCheckpoint::inexact. The line names the part of its state that a run cannot
// continue exactly from a checkpoint or a commit. A function returns nothing if the run continues exactly, or does not
// need the missing part. The loads of checkpoints and of commits call these functions.

/// Returns the line for a run that was saved by a program whose noise had the version `saved_version` (kNoiseVersion).
/// There is a line only if the strategy draws noise that has changed since that version.
std::optional<std::string> other_noise(const Strategy& strategy, std::int64_t saved_version);

/// Returns the line for a run whose learning rate rises over samples, if the save after `steps` updates does not have
/// the number of samples in these updates (Engine::samples_seen).
std::optional<std::string> unknown_samples(const Strategy& strategy, std::int64_t steps, std::int64_t samples);

/// Reads learning rates that were set by hand into `rates` (StepProgress::rates). If the strategy has a schedule that
/// sets the rates, these rates are not read, since the strategy may have changed since the save. `saved`: the rates in
/// the `source`, which is "checkpoint" or "commit"; empty if the source has none.
std::optional<std::string> read_rates(const Strategy& strategy, const std::vector<std::optional<double>>& saved,
                                      const char* source, std::vector<double>& rates);

}  // namespace tessera
