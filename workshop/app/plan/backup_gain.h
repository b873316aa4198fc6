#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "planner/simulated_world.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"

namespace tessera::app {

/// The costs and the gain of "deal.backups" for ranks of given speeds, compared with the same strategy without backups.
struct BackupGain {
  std::int64_t backups = 0;                             ///< deal.backups
  double seconds = 0, without_s = 0;                    ///< mean seconds of a step with backups, and without
  double made_again = 0, twice = 0;                     ///< SimulatedWorld::made_again and twice
  std::int64_t memory_bytes = 0;                        ///< memory of a rank that the backups need
  std::int64_t sent_bytes = 0;                          ///< additional bytes that a rank sends in a step
  double won_s() const { return without_s - seconds; }  ///< below 0 if the step takes longer
};

/// Returns whether the strategy has backups that can be simulated.
bool has_backups(const PlannedWorld& world);
/// Returns the gain for ranks that differ as `options` describe. `with` is the simulated world with backups, if the
/// caller has it already, or else null. Throws tessera::Error as simulated does. REQUIRES: has_backups.
BackupGain backup_gain(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options,
                       const SimulatedWorld* with = nullptr);

/// Returns a text for users. The text also names the costs that the numbers do not contain.
std::string to_text(const BackupGain& gain);
nlohmann::ordered_json to_json(const BackupGain& gain);

}  // namespace tessera::app
