#include "workshop/app/plan/sync_modes.h"

#include <numeric>

#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "tessera/error.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/unlike_ranks.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMaxStaleness = 4, kEvery = 8;  // where the user gave no number

// The guide says more (docs/guide/strategies.md, "When ranks differ in speed").
constexpr char kWhenToTakeWhich[] =
    "Where ranks are alike, keep steps synchronous, and take local_sgd or diloco where it is the network that is "
    "slow.\n"
    "Where ranks stall now and then, take backups; where one stays slower, deal by speed gives it fewer microbatches.\n"
    "Where neither is enough, or workers come and go, take asynchronous with a max_staleness and a smaller rate.\n"
    "All but synchronous steps change what is computed, so none is chosen here; docs/guide/strategies.md says more.\n";

/// Returns `best` with the placement of ranks that train common parameters.
Strategy with_common_parameters(Strategy best, const SyncConfig& sync) {
  best.strategy = ShardingStrategy::kShardOptimizer;
  best.mesh = {};
  best.sync = sync;
  return best;
}

/// Returns `best` with replicas that meet in outer steps. A mesh that is already divided stays the same. Otherwise each
/// host is a replica. If there is only one host, each rank is a replica.
Strategy with_replicas(Strategy best, const SyncConfig& sync, const Topology& topology) {
  best.sync = sync;
  const std::int64_t world = topology.world_size, shards = best.mesh.shards();
  if (best.mesh.replicas() <= 1 && (shards == 0 || shards == world)) {
    const std::int64_t replicas = topology.num_hosts() > 1 ? topology.num_hosts() : world;
    best.mesh = {};
    best.mesh.replicate = replicas;
    best.mesh.shard = world / replicas;
    if (replicas == world) best.strategy = ShardingStrategy::kNoShard;
  }
  if (best.strategy == ShardingStrategy::kFullShard) best.strategy = ShardingStrategy::kHybridShard;
  return best;
}

std::vector<TriedMode> modes_for(const Strategy& like, Strategy best, const Topology& topology, bool has_servers) {
  best.sync = {};
  std::vector<TriedMode> modes = {{"synchronous", best}};
  best.compression = like.compression;
  best.secondary = {};
  const auto add_common = [&](const std::string& name, const SyncConfig& sync) {
    modes.push_back({name, with_common_parameters(best, sync)});
  };
  const std::string bound = "asynchronous, max_staleness " + std::to_string(kMaxStaleness);
  add_common("backups, count 1", {.type = SyncType::kBackups, .backups = 1});
  SyncConfig bounded{.type = SyncType::kAsynchronous};
  bounded.asynchronous.max_staleness = kMaxStaleness;
  add_common(bound, bounded);
  if (has_servers) {
    bounded.asynchronous.owners = ShardOwners::kServers;
    add_common(bound + ", owners servers", bounded);
  }
  add_common("hogwild", {.type = SyncType::kHogwild});
  const SyncConfig given = like.sync.makes_outer_steps() ? like.sync : SyncConfig{.every = kEvery};
  SyncConfig local{.type = SyncType::kLocalSgd, .every = given.every};
  SyncConfig diloco{.type = SyncType::kDiloco, .every = given.every, .outer = given.outer};
  SyncConfig streaming = diloco;
  streaming.type = SyncType::kStreamingDiloco;
  streaming.fragments = given.fragments;
  streaming.delay = given.delay;
  streaming.mix = given.mix;
  const std::string every = ", every " + std::to_string(given.every);
  modes.push_back({"local_sgd" + every, with_replicas(best, local, topology)});
  modes.push_back({"diloco" + every, with_replicas(best, diloco, topology)});
  modes.push_back({"streaming_diloco" + every, with_replicas(best, streaming, topology)});
  return modes;
}

/// Returns the first error of a refusal. The text begins with the key that the error names.
std::string reason_of(const TriedMode& mode) {
  const std::string first = mode.refusal.substr(0, mode.refusal.find('\n'));
  const std::size_t key = first.find('/');
  return key == std::string::npos ? first : first.substr(key);
}

/// Simulates a mode on a world that is planned for it.
void simulate_into(TriedMode& mode, const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options) {
  const SyncConfig& sync = world.strategy.sync;
  if (sync.type == SyncType::kEachStep) {
    mode.seconds = simulated(world, files, options).mean_s;
    mode.microbatches = static_cast<double>(world.plan.order().all());
    return;
  }
  const SimulatedMode found = simulated_mode(world, files, options);
  const auto gradients = std::accumulate(found.run.steps.begin(), found.run.steps.end(), std::int64_t{0});
  const std::int64_t each = world.topology.world_size / found.ranks * found.cost.microbatches;
  mode.seconds = found.seconds();
  mode.microbatches = static_cast<double>(gradients * each) / static_cast<double>(found.steps);
  mode.staleness_mean = found.run.staleness_mean;
}

}  // namespace

std::vector<TriedMode> try_modes(const models::ModelConfig& config, const Strategy& like, const Strategy& best,
                                 const Topology& topology, const TimingFiles& files, const WorldOptions& options) {
  const ModelShapes model(config);
  const bool has_servers = files.servers > 0 || topology.num_hosts() > 1;
  std::vector<TriedMode> modes = modes_for(like, best, topology, has_servers);
  for (TriedMode& mode : modes) {
    TimingFiles own = files;
    if (!mode.strategy.sync.has_servers()) own.servers = 0;
    try {
      const Strategy strategy = Strategy::from_json(mode.strategy.to_json(), "auto");
      const PlannedWorld world{strategy, config, topology, model.plan(strategy, topology)};
      mode.bytes = world.plan.use().limited();
      mode.fits = like.memory.limit_bytes <= 0 || mode.bytes <= like.memory.limit_bytes;
      simulate_into(mode, world, own, options);
    } catch (const Error& error) {
      if (error.exit_code() != ExitCode::kConfig) throw;
      mode.refusal = error.message();
    }
  }
  return modes;
}

std::string to_text(std::span<const TriedMode> modes) {
  TextTable table({left_column("\"sync\""), right_column("s a step"), right_column("steps a s"),
                   right_column("microbatches a s"), right_column("times as fast"), right_column("staleness"),
                   right_column("a rank needs"), left_column("fits")});
  const double synchronous = modes.front().microbatches_per_s();
  std::string impossible;
  for (const TriedMode& mode : modes) {
    if (!mode.refusal.empty()) {
      impossible += "not possible: " + mode.name + ": " + reason_of(mode) + "\n";
      continue;
    }
    const double speed = mode.microbatches_per_s();
    table.add_row({mode.name, number_text(mode.seconds, "%.4f"),
                   number_text(mode.seconds > 0 ? 1 / mode.seconds : 0, "%.3f"), number_text(speed, "%.3f"),
                   synchronous > 0 ? number_text(speed / synchronous, "%.2f") : "",
                   mode.strategy.sync.is_asynchronous() ? number_text(mode.staleness_mean, "%.2f") : "",
                   format_bytes(mode.bytes), mode.fits ? "yes" : "no"});
  }
  return "modes of \"sync\" on these ranks, simulated\n" + table.to_string() + impossible + kWhenToTakeWhich;
}

nlohmann::ordered_json to_json(std::span<const TriedMode> modes) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const TriedMode& mode : modes) {
    nlohmann::ordered_json& each = json.emplace_back(nlohmann::ordered_json{{"mode", mode.name}});
    if (!mode.refusal.empty()) {
      each["not_possible"] = reason_of(mode);
      continue;
    }
    each["seconds"] = mode.seconds;
    each["microbatches_per_s"] = mode.microbatches_per_s();
    each["staleness_mean"] = mode.staleness_mean;
    each["total_bytes"] = mode.bytes;
    each["fits"] = mode.fits;
    each["strategy"] = nlohmann::ordered_json::parse(mode.strategy.to_json());
  }
  return json;
}

}  // namespace tessera::app
