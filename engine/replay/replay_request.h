#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// The request in TESSERA_REPLAY, as JSON. It makes a program repeat steps of a run that had "reproducible", with any
/// number of ranks that can share the microbatches. A user sets the variable when starting the program
/// (docs/reproducible.md).
///
///   TESSERA_REPLAY='{"step": 120, "hashes": "runs/a/hashes.jsonl", "find": "nonfinite"}'
struct ReplayRequest {
  enum class Find : std::uint8_t {
    kNothing,     ///< nothing is searched for: only step `step` is compared with the file `hashes`
    kNonfinite,   ///< search for the first microbatch, unit and operator whose result is not finite
    kDivergence,  ///< search for the first step and unit whose hash differs from the recorded hash
  };

  std::int64_t step = 0;  ///< the last step that is looked at
  std::string hashes;     ///< file that "record_hashes" wrote; empty: nothing is compared
  /// The number of microbatches of all ranks in a step. 0: the file `hashes` gives the number, in its line for `step`.
  /// If the file lacks that line, the line of the next step is used, or else the last line.
  std::int64_t microbatches = 0;
  Find find = Find::kNothing;

  /// Returns the request in the environment of this process, or nothing without TESSERA_REPLAY. Throws tessera::Error
  /// (78) if the variable does not hold a valid request.
  static std::optional<ReplayRequest> from_environment();
  std::string to_json() const;
};

/// Returns the strategy with which `ranks` ranks compute the microbatches of the run that is replayed:
/// gradient_accumulation is set for these ranks, and "mesh" and "deal" are left out. Returns `strategy` unchanged if
/// there is no TESSERA_REPLAY. Throws tessera::Error (78) if these ranks cannot share the microbatches evenly, or if
/// the strategy has no "reproducible" or has "durable". Throws the errors of read_step_records too.
Strategy as_replayed(Strategy strategy, int ranks);

/// Throws tessera::Error (78) if TESSERA_REPLAY is set, since a GPU cannot make steps again. Training calls it if a GPU
/// trains.
void expect_no_replay();

}  // namespace tessera
