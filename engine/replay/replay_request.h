#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// The request in TESSERA_REPLAY, as JSON: steps of a run with "reproducible" are made again, with any number of ranks
/// that fits. A program is started with it by hand (docs/reproducible.md).
///
///   TESSERA_REPLAY='{"step": 120, "hashes": "runs/a/hashes.jsonl", "find": "nonfinite"}'
struct ReplayRequest {
  enum class Find : std::uint8_t {
    kNothing,     ///< step `step` alone is compared with the file
    kNonfinite,   ///< the first microbatch, unit and operator whose result is not finite
    kDivergence,  ///< the first step and unit whose hash is not the recorded one
  };

  std::int64_t step = 0;  ///< the last step that is looked at
  std::string hashes;     ///< file that "record_hashes" wrote; empty: nothing is compared
  /// Microbatches of all ranks in a step. 0: the number that `hashes` has for `step`, else for the next step that it
  /// has, else for its last step.
  std::int64_t microbatches = 0;
  Find find = Find::kNothing;

  /// Returns the request of this process's environment; it is empty without TESSERA_REPLAY. Throws tessera::Error (78)
  /// where the variable holds no such request.
  static std::optional<ReplayRequest> from_environment();
  std::string to_json() const;
};

/// Returns the strategy under which `ranks` ranks make the microbatches of the run that is replayed:
/// gradient_accumulation is set for these ranks, and "mesh" is left out. Returns `strategy` unchanged if there is no
/// TESSERA_REPLAY. Throws tessera::Error (78) where these ranks cannot make the microbatches, and the errors of
/// read_step_records.
Strategy as_replayed(Strategy strategy, int ranks);

/// Throws tessera::Error (78) under TESSERA_REPLAY: a GPU cannot make steps again. Training calls it if a GPU trains.
void expect_no_replay();

}  // namespace tessera
