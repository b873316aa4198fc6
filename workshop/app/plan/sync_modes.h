#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "planner/rank_speeds.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/models/language_model.h"

namespace tessera::app {

/// A way in which ranks wait for each other ("sync"), and its predicted speed.
struct TriedMode {
  std::string name;  ///< such as "backups, count 1"
  Strategy strategy;
  std::string refusal = {};  ///< why these ranks cannot train in this mode (the numbers are 0); empty: they can
  double seconds = 0;        ///< seconds of a step, which has one gradient of each rank (fewer with backups)
  double microbatches = 0;   ///< microbatches of all ranks in a step, without those whose gradients are dropped
  double staleness_mean = 0;
  std::int64_t bytes = 0;  ///< memory that a rank needs (MemoryUse::limited)
  bool fits = true;        ///< bytes are within Strategy::memory.limit_bytes

  /// Returns the speed by which modes are compared. The samples per second are this speed times a microbatch's samples.
  double microbatches_per_s() const { return seconds > 0 ? microbatches / seconds : 0.0; }
};

/// Simulates the modes of "sync" for ranks that differ as `options` say: synchronous steps by `best`, which come first,
/// then backups, asynchronous ranks, hogwild, and replicas that meet in outer steps. `tessera plan --strategy auto`
/// shows them beside its choice, and chooses none of them, since every mode except the first changes the results of
/// training.
///
/// `like` has the keys that the user gave. Its compression and its numbers of "sync" for outer steps are used. Its mesh
/// is used for outer steps, if it divides the ranks; otherwise each host is a replica, or each rank if there is only
/// one host. If ranks are on several hosts, or if `files.servers` is above 0, parameter servers own the shards of an
/// asynchronous mode. Throws tessera::Error: 64 if `options` are out of range, or if the run is too long to simulate;
/// 65 if `files` are of another model.
std::vector<TriedMode> try_modes(const models::ModelConfig& config, const Strategy& like, const Strategy& best,
                                 const Topology& topology, const TimingFiles& files, const WorldOptions& options);

/// Returns a table for readers, the reasons of modes that are not possible, and when to take which mode.
std::string to_text(std::span<const TriedMode> modes);
nlohmann::ordered_json to_json(std::span<const TriedMode> modes);

}  // namespace tessera::app
