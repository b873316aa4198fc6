#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/job/mesh_shape.h"
#include "engine/memory/make_plan.h"
#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "runtime/border/throw.h"
#include "runtime/config/placement_rows.h"
#include "tessera/engine.h"
#include "tessera/run.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/app/plan/backup_gain.h"
#include "workshop/app/plan/choose_strategy.h"
#include "workshop/app/plan/mode_time.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/app/plan/scaled_worlds.h"
#include "workshop/app/plan/step_traffic.h"
#include "workshop/app/plan/sync_modes.h"
#include "workshop/app/plan/unlike_ranks.h"
#include "workshop/bench/disk_speed.h"
#include "workshop/bench/number_text.h"
#include "workshop/models/language_model.h"

namespace tessera::app {
namespace {

// `tessera plan` prints the plan of a world as tables or JSON.
//
// `run_plan` makes the plan of the model without memory (plan_of_world.h), and prints categories, units and the traffic
// of a step (step_traffic.h). If measurements are given, it also prints the predicted time of a step (plan_time.h, or
// mode_time.h if ranks have clocks of their own). `measure_disks` adds the time of the disks' traffic. If the strategy
// is "auto", `choose_strategy` compares all strategies (choose_strategy.h) instead of printing one plan, and shows
// modes of "sync" beside its choice (sync_modes.h).

std::int64_t padding_of(const UnitShape& unit) {
  std::int64_t padding = 0;
  for (const GroupShape& group : unit.groups) padding += group.layout.padding();
  return padding;
}

std::int64_t numel_of(const UnitShape& unit) {
  std::int64_t numel = 0;
  for (const GroupShape& group : unit.groups) numel += group.layout.numel();
  return numel - padding_of(unit);
}

std::string units_table(const MemoryPlan& plan) {
  using Align = TextTable::Align;
  TextTable table({{"unit"}, {"parameters", Align::kRight}, {"padding", Align::kRight}, {"gathered", Align::kRight}});
  for (const UnitShape& unit : plan.units()) {
    table.add_row({unit.name, std::to_string(numel_of(unit)), std::to_string(padding_of(unit)),
                   format_bytes(unit.gathered_bytes())});
  }
  return table.to_string();
}

/// Returns the mesh of all ranks. If replicas train by themselves, the plan is for one replica only.
MeshPosition whole_mesh(const MemoryPlan& plan) {
  MeshPosition mesh = plan.placement().mesh;
  mesh.replicate_size *= plan.placement().replicas;
  return mesh;
}

/// Returns the bytes that one rank sends, and also receives, in a collective. An all-gather, a reduce-scatter or an
/// all-to-all of n ranks sends (n - 1)/n of the whole buffer. An all-reduce consists of two of these collectives, and
/// sends twice as much. The bytes of a collective that does not run in each step are divided by the number of steps
/// from one call to the next.
std::int64_t wire_bytes(const StepCollective& each, const MemoryPlan& plan) {
  const MeshPosition mesh = whole_mesh(plan);
  const std::int64_t ranks = each.axis == "shard"       ? mesh.shard_size
                             : each.axis == "secondary" ? plan.placement().secondary.ranks
                             : each.axis == "world"     ? mesh.world_size()
                             : each.axis == "replica"   ? plan.update().outer.asynchronous.replica_ranks
                                                        : mesh.replicate_size;
  const std::int64_t once = each.bytes / ranks * (ranks - 1) + each.bytes % ranks * (ranks - 1) / ranks;
  return (each.operation == "all_reduce" ? 2 * once : once) / each.every;
}

std::int64_t wire_bytes_of_step(const MemoryPlan& plan) {
  std::int64_t bytes = 0;
  for (const StepCollective& each : collectives_of_step(plan)) bytes += wire_bytes(each, plan);
  return bytes;
}

std::string traffic_table(const MemoryPlan& plan) {
  using Align = TextTable::Align;
  TextTable table({{"collective"},
                   {"axis"},
                   {"calls", Align::kRight},
                   {"bytes", Align::kRight},
                   {"a rank sends", Align::kRight},
                   {"of"}});
  for (const StepCollective& each : collectives_of_step(plan)) {
    table.add_row({each.operation, each.axis, std::to_string(each.calls), format_bytes(each.bytes),
                   format_bytes(wire_bytes(each, plan)),
                   each.every == 1 ? each.what : each.what + ", every " + std::to_string(each.every) + " steps"});
  }
  return table.to_string() + "all together: a rank sends " + format_bytes(wire_bytes_of_step(plan)) +
         " a step, and receives as much; ranks that share memory read instead\n";
}

/// The time that the traffic of a step takes on the disks of a host. All ranks of the host share these disks.
struct DiskTime {
  double bytes_per_s = 0;  ///< rate of all paths together, read and written back
  double seconds = 0;      ///< time of a step's traffic, if the disks do nothing else
};

absl::StatusOr<DiskTime> measure_disks(const MemoryPlan& plan, const Strategy& strategy, const Topology& topology) {
  // The size of the records of gradients is left out: each is a whole unit, and a disk moves large records at least as
  // fast as small ones.
  const std::int64_t largest = std::max(plan.records().parameters.record_bytes, plan.records().states.record_bytes);
  const std::int64_t record_bytes = largest > 0 ? largest : strategy.offload.record_bytes;
  const auto in_flight = static_cast<int>(2 * plan.records().queue_depth);
  DiskTime time;
  for (const std::string& directory : strategy.offload.paths) {
    TESSERA_ASSIGN_OR_RETURN(const DiskSpeed speed,
                             measure_disk({.directory = directory,
                                           .bytes = std::min(std::int64_t{1} << 30, 256 * record_bytes),
                                           .record_bytes = static_cast<std::size_t>(record_bytes),
                                           .in_flight = in_flight}));
    time.bytes_per_s += speed.mixed_bytes_per_s();
  }
  const auto of_a_rank =
      static_cast<double>(plan.records().disk.read_in_two_steps + plan.records().disk.written_in_two_steps) / 2;
  time.seconds = of_a_rank * topology.local_world_size / time.bytes_per_s;
  return time;
}

std::string to_text(const DiskTime& time) {
  return "disks: " + number_text(time.bytes_per_s * 1e-9, "%.2f") +
         " GB/s read and written back, measured now; a step's traffic of all ranks of a host takes " +
         number_text(time.seconds, "%.3f") + " s\n";
}

nlohmann::ordered_json to_json(const PlacementAxes& axes) {
  return {{"parameters", names_of_axes(axes.parameters)},
          {"gradients", names_of_axes(axes.gradients)},
          {"optimizer", names_of_axes(axes.optimizer)}};
}

nlohmann::ordered_json to_json(const MemoryPlan& plan, const Strategy& strategy, std::int64_t parameters) {
  const MeshPosition mesh = whole_mesh(plan);
  nlohmann::ordered_json json = {{"parameters", parameters},
                                 {"world_size", mesh.world_size()},
                                 {"mesh", {{"replicate", mesh.replicate_size}, {"shard", mesh.shard_size}}},
                                 {"placement", to_json(placement_axes(strategy))},
                                 {"total_bytes", plan.use().total()},
                                 {"limited_bytes", plan.use().limited()}};
  for (std::size_t i = 0; i < kMemoryCategories; ++i)
    json["bytes"][name_of(static_cast<MemoryCategory>(i))] = plan.use().bytes[i];
  json["disk"] = {{"bytes", plan.records().disk.bytes},
                  {"records", plan.records_on_disk()},
                  {"read_in_two_steps", plan.records().disk.read_in_two_steps},
                  {"written_in_two_steps", plan.records().disk.written_in_two_steps},
                  {"durable_bytes", plan.records().disk.durable_bytes},
                  {"written_in_commit", plan.records().disk.written_in_commit}};
  json["streamed_bytes"] = plan.records().streamed_bytes;
  json["uploaded_bytes"] = plan.slots().uploaded_bytes;
  json["gradients"] = {{"to_host", plan.records().gradient_copies.to_host},
                       {"to_gpu", plan.records().gradient_copies.to_gpu}};
  json["host_step"] = {{"to_host", plan.passes().host_step.to_host}, {"to_gpu", plan.passes().host_step.to_gpu}};
  if (const MemoryPlan::ServedBytes served = plan.served_bytes(); served.shards > 0)
    json["servers"] = {{"bytes", served.shards}, {"sent", served.sent}, {"received", served.received}};
  json["units"] = nlohmann::ordered_json::array();
  for (const UnitShape& unit : plan.units()) {
    json["units"].push_back({{"name", unit.name},
                             {"parameters", numel_of(unit)},
                             {"padding", padding_of(unit)},
                             {"gathered_bytes", unit.gathered_bytes()}});
  }
  json["collectives"] = nlohmann::ordered_json::array();
  for (const StepCollective& each : collectives_of_step(plan)) {
    json["collectives"].push_back({{"operation", each.operation},
                                   {"axis", each.axis},
                                   {"of", each.what},
                                   {"every", each.every},
                                   {"calls", each.calls},
                                   {"bytes", each.bytes},
                                   {"wire_bytes_of_a_rank", wire_bytes(each, plan)}});
  }
  json["wire_bytes_of_a_rank"] = wire_bytes_of_step(plan);
  return json;
}

std::string to_text(const MemoryPlan& plan, const Strategy& strategy, std::int64_t parameters) {
  const MeshPosition mesh = whole_mesh(plan);
  std::string text = "plan of " + name_of_placement(strategy) + " for " + std::to_string(mesh.world_size()) +
                     " ranks, mesh " + std::to_string(mesh.replicate_size) + " x " + std::to_string(mesh.shard_size) +
                     " (replicate x shard), " + std::to_string(parameters) + " parameters in " +
                     std::to_string(plan.units().size()) + " units\n";
  text += "placement: " + describe_placement(strategy) + "\n\n";
  text += "memory of every rank\n" + plan.to_table() + "\nunits\n" + units_table(plan) + "\n";
  const std::string traffic = traffic_table(plan);
  return text + "collectives of a step, whole buffers (" + std::to_string(plan.wire().accumulation) +
         " microbatches)\n" + (mesh.world_size() > 1 ? traffic : "none: one rank\n") +
         (compresses(strategy.compression) || strategy.compression.gathers != WireForm::kPlain
              ? "\"compression\" is not in this table: over a network less is sent\n"
              : "");
}

absl::Status check_limit(const MemoryPlan& plan, const Strategy& strategy, const Topology& topology) {
  const std::int64_t limit = strategy.memory.limit_bytes;
  if (limit <= 0 || plan.use().limited() <= limit) return absl::OkStatus();
  const bool shares_memory = would_share_memory(mesh_shape(strategy, topology), topology, strategy.comm.transport);
  const std::string cheaper = next_cheaper(plan, strategy, shares_memory, limit);
  return make_error(ExitCode::kConfig,
                    "/memory/limit: the plan for " + name_of_placement(strategy) + " needs " +
                        format_bytes(plan.use().limited()) + " a rank, the limit is " + format_bytes(limit) +
                        (cheaper.empty() ? ". [T0030] hint: no strategy fits; take more ranks, a smaller "
                                           "model or bf16 parameters"
                                         : ". [T0031] hint: the next cheaper strategy that fits is " + cheaper));
}

/// Returns how many steps to simulate. Ranks that are alike need few steps. Very many ranks also need few steps, since
/// some of them stall in each step.
std::int64_t steps_for(const UnlikeRanks& ranks, int world_size) {
  return ranks.differ() ? std::clamp(25600 / world_size, 10, 100) : 10;
}

/// Returns the modes of "sync" for the ranks of the command. The list is empty if all ranks are alike, no servers are
/// asked for, and the ranks are too many to simulate, or seldom wait for each other under a strategy without outer
/// steps.
std::vector<TriedMode> modes_beside(const PlanCommand& command, const models::ModelConfig& config, const Strategy& like,
                                    const TriedStrategy& best, const TimingFiles& files) {
  constexpr double kMuchWaiting = 0.1;  // share of a step
  const Topology topology = topology_of(command.world);
  const bool is_asked = command.ranks.differ() || command.timing.servers > 0;
  const bool is_likely = like.sync.makes_outer_steps() || best.step.communication_share() >= kMuchWaiting;
  if (!is_asked && (!is_likely || topology.world_size > kMostSimulatedRanks)) return {};
  WorldOptions options = options_of(command.ranks);
  options.steps = steps_for(command.ranks, topology.world_size);
  return try_modes(config, like, best.strategy, topology, files, options);
}

void choose_strategy(const PlanCommand& command) {
  if (command.timing.links.empty())
    throw Error(ExitCode::kUsage,
                "plan: --strategy auto compares steps by their time, and so needs --links and --profile. [T0032] hint: "
                "tessera doctor --links writes the file for --links, and tessera train --profile that for --profile");
  const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
  throw_if_error(check_outputs(
      {{"--write", command.write, {}}},
      {{"--links", command.timing.links, {}}, {"--profile", command.timing.profile, {}}, {"--like", command.like, {}}},
      existing));
  const Topology topology = topology_of(command.world);
  const Strategy like = command.like.empty() ? Strategy() : Strategy::from_file(command.like);
  const models::ModelConfig config = value_or_throw(models::read_model_config(command.world.model));
  const TimingFiles files = read_timing(command.timing);
  TimingFiles without_servers = files;  // the compared strategies have no servers, but modes_beside may try some
  without_servers.servers = 0;
  const std::vector<TriedStrategy> tried =
      try_strategies(config, like, topology, without_servers, command.accumulations);
  const TriedStrategy& best = tried.front();
  const std::vector<ScaledWorld> scaled = scaled_worlds(ModelShapes(config), best.strategy, topology, without_servers);
  const std::vector<TriedMode> modes = modes_beside(command, config, like, best, files);
  if (command.json) {
    nlohmann::ordered_json json = to_json(tried);
    json[0]["scaling"] = to_json(scaled);
    if (!modes.empty()) json[0]["modes"] = to_json(modes);
    std::cout << json.dump(2) << "\n";
  } else {
    std::cout << to_text(tried) << "\n" << name_of(best.strategy.strategy) << " on " << to_text(scaled);
    if (!modes.empty()) std::cout << "\n" << to_text(modes);
  }
  if (!best.fits) {
    const auto least = std::ranges::min_element(tried, {}, &TriedStrategy::bytes);
    throw Error(ExitCode::kConfig, "/memory/limit: no strategy fits in " + format_bytes(like.memory.limit_bytes) +
                                       " a rank; " + name_of(least->strategy.strategy) + " needs least, " +
                                       format_bytes(least->bytes) +
                                       ". [T0033] hint: take more ranks, bf16 parameters, or \"offload\"");
  }
  if (!command.write.empty())
    throw_if_error(write_output(command.write, best.strategy.to_json() + "\n", existing, "plan"));
}

void expect_no_choice(const PlanCommand& command) {
  for (const auto& [option, is_given] :
       {std::pair("--like", !command.like.empty()), std::pair("--accumulations", !command.accumulations.empty()),
        std::pair("--write", !command.write.empty())}) {
    if (is_given)
      throw Error(
          ExitCode::kUsage,
          std::string("plan: ") + option +
              " goes with --strategy auto, which compares strategies. [T0034] hint: give --strategy auto, or leave " +
              option + " out");
  }
}

/// Returns the cost and the gain of backups for the ranks of the command; nothing if the strategy has none, or nothing
/// was measured, or there are too many ranks to simulate. Throws if the options say that ranks differ, and no
/// prediction would use these options.
std::optional<BackupGain> gain_of(const PlanCommand& command, const PlannedWorld& world) {
  const bool differ = command.ranks.differ(), is_timed = !command.timing.links.empty();
  if (differ && !(has_backups(world) && is_timed))
    throw Error(ExitCode::kUsage,
                "plan: --jitter, --straggler and --stall go with --strategy auto, which compares modes of \"sync\", or "
                "with a strategy that has deal.backups, and --links and --profile. [T1161] hint: leave them out, or "
                "take tessera simulate, which plays any strategy for ranks that differ");
  if (!has_backups(world) || !is_timed || (!differ && world.topology.world_size > kMostSimulatedRanks))
    return std::nullopt;
  WorldOptions options = options_of(command.ranks);
  options.steps = steps_for(command.ranks, world.topology.world_size);
  return backup_gain(world, read_timing(command.timing), options);
}

}  // namespace

int run_plan(const PlanCommand& command) {
  return run([&] {
    if (command.world.strategy == "auto") return choose_strategy(command);
    expect_no_choice(command);
    const PlannedWorld world = plan_of_world(command.world);
    const auto& [strategy, config, topology, plan] = world;
    const std::int64_t parameters = models::parameter_count(config);
    std::optional<DiskTime> disks;
    if (command.measure_disks && plan.records().disk.bytes > 0)
      disks = value_or_throw(measure_disks(plan, strategy, topology));
    std::optional<PredictedStep> step;
    std::optional<ModeCost> mode;
    AlikeSteps alike;
    std::vector<ScaledWorld> scaled;
    const std::optional<BackupGain> gain = gain_of(command, world);
    if (!command.timing.links.empty()) {
      const TimingFiles files = read_timing(command.timing);
      if (strategy.sync.has_common_parameters()) {
        mode = mode_cost_of(world, files);
        alike = steps_of_alike(*mode, ranks_of_mode(plan));
      } else {
        step = predicted_step(plan, files, topology.local_world_size);
        scaled = scaled_worlds(ModelShapes(config), strategy, topology, files);
      }
    }
    if (command.json) {
      nlohmann::ordered_json json = to_json(plan, strategy, parameters);
      if (disks) json["disk"]["measured"] = {{"bytes_per_s", disks->bytes_per_s}, {"seconds_a_step", disks->seconds}};
      if (step) json["step"] = to_json(*step);
      if (step) json["scaling"] = to_json(scaled);
      if (gain) json["backups"] = to_json(*gain);
      if (mode) json["step"] = to_json(*mode, alike);
      std::cout << json.dump(2) << "\n";
    } else {
      std::cout << to_text(plan, strategy, parameters);
      if (disks) std::cout << to_text(*disks);
      if (step) std::cout << "\n" << to_text(*step) << "\n" << to_text(scaled);
      if (gain) std::cout << "\n" << to_text(*gain);
      if (mode) std::cout << "\n" << to_text(*mode, alike);
    }
    throw_if_error(check_limit(plan, strategy, topology));
  });
}

}  // namespace tessera::app
