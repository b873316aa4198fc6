#pragma once

// See docs/glossary.md: unit.

#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// A part of a round. A round is forward and backward of one microbatch.
enum class RoundPass { kForward, kBackward };

/// A use of a unit: from the first operator that reads it to the first operator that reads another unit.
struct ProfileEntry {
  std::string unit;  ///< UnitShape::name
  RoundPass pass = RoundPass::kForward;
  double seconds = 0;
  friend bool operator==(const ProfileEntry&, const ProfileEntry&) = default;
};

/// Times that were measured of a model on a single rank.
///
/// Entries are in the order of a round. Consecutive uses of a unit are one entry. The recomputation of a unit in
/// backward has its own entry if other units are used between it and the unit's backward. After the last "backward"
/// entry of a unit, its gradients are complete and are reduced. So the last operation of a backward, such as that of
/// the root's embedding, needs an entry even if it reads no parameters.
///
/// The file is profile.json. Every key is needed; numbers are finite and from 0 to 1e9:
///
///     {
///       "entries": [                        1 to 65536 entries
///         {"unit": "(root)", "pass": "forward", "seconds": 0.003},
///         {"unit": "blocks.0", "pass": "forward", "seconds": 0.012},
///         {"unit": "blocks.0", "pass": "backward", "seconds": 0.025},
///         ...],
///       "update": {"seconds": 0.02,         seconds of the update of one step
///                  "elements": 10640640},   number of updated elements; a share of them takes a share of the seconds
///       "rest_s": 0.001                     seconds of all other work of a step on one rank: data, checks, end of step
///     }
struct StepProfile {
  std::vector<ProfileEntry> entries = {};
  double update_seconds = 0;
  std::int64_t updated_elements = 0;  ///< above 0 if update_seconds is above 0
  double rest_seconds = 0;

  /// Returns the seconds of a step of `microbatches` rounds on one rank, which updates all elements. `microbatches` may
  /// be a mean, which need not be whole.
  double step_seconds(double microbatches) const;

  friend bool operator==(const StepProfile&, const StepProfile&) = default;
};

/// Returns the index in the plan of each entry's unit. Returns an error (65) if an entry's unit is not in the plan.
absl::StatusOr<std::vector<int>> units_of(const StepProfile& profile, const MemoryPlan& plan);

/// Adds a sentence to `left_out` if the profile has no time for some of the plan's units that have parameters. The
/// sentence names the first of these units and the number of the others. Such a profile comes from another model, or
/// from a step that did not use these units.
void name_units_without_times(const StepProfile& profile, const MemoryPlan& plan, std::vector<std::string>& left_out);

/// The next three functions work as parse_links, read_links and to_json do (planner/measured/links.h).
absl::StatusOr<StepProfile> parse_step_profile(const std::string& text, const std::string& name);
absl::StatusOr<StepProfile> read_step_profile(const std::filesystem::path& path);
std::string to_json(const StepProfile& profile);

}  // namespace tessera
