// Tests the orders that `tessera simulate --order` writes: all ranks play an order in one process, as threads. The
// results have the bits of plain LibTorch on one thread, and gradients have the ages of the simulation.

#include "workshop/app/plan/simulated_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/detailed_plan.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/engine/asynchronous/whole_rules_oracle.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::app {
namespace simulated_order_test {

using ::testing::HasSubstr;
using testing::OrderLine;
using testing::OrderOption;
using testing::Session;
using testing::Tiny;
using testing::Values;

constexpr int kRanks = 3, kServers = 2;

Topology one_host(int ranks) {
  Topology topology;
  topology.world_size = topology.local_world_size = ranks;
  topology.launcher = "thread";
  return topology;
}

/// Returns a profile in which each unit of the plan is used.
StepProfile profile_of(const MemoryPlan& plan) {
  StepProfile profile;
  for (const UnitShape& unit : plan.units()) profile.entries.push_back({unit.name, RoundPass::kForward, 1.0});
  return profile;
}

/// Returns a simulated run. The last rank is half as fast as the other ranks, and ranks stall in some steps.
ModeTimeline timeline_of(const AsynchronousConfig& config) {
  const ModeRun run{.rule = {.kind = ModeRule::Kind::kAsynchronous, .max_staleness = config.max_staleness},
                    .costs = {.pull_s = 0.125, .push_s = 0.25},
                    .ranks = kRanks,
                    .steps = 4};
  return play_mode(run, [](int rank, std::int64_t step) {
    return (rank == kRanks - 1 ? 2.0 : 1.0) + (step % 3 == rank ? 0.625 : 0.0);
  });
}

/// Returns the steps of each rank in a simulated run.
std::vector<std::size_t> steps_of(const ModeTimeline& timeline) {
  std::vector<std::size_t> steps(kRanks);
  for (const ModeStep& step : timeline.steps) ++steps[static_cast<std::size_t>(step.rank)];
  return steps;
}

/// Returns the ages of each rank's gradients in a simulated run [rank][step].
std::vector<std::vector<std::int64_t>> ages_of(const ModeTimeline& timeline) {
  std::vector<std::vector<std::int64_t>> ages(kRanks);
  const std::vector<std::int64_t> all = timeline.ages();
  std::size_t pushes = 0;
  for (const ModeEvent& event : timeline.events())
    if (event.is_push) ages[static_cast<std::size_t>(event.rank)].push_back(all[pushes++]);
  return ages;
}

/// Expects that each shard of the order has the pushes of the simulated run, and these ages.
void expect_ages_of_shards(const std::vector<OrderLine>& lines, const ModeTimeline& timeline) {
  std::map<std::tuple<std::string, std::size_t, int>, std::vector<std::int64_t>> ages;
  std::map<std::tuple<std::string, std::size_t, int, int>, std::int64_t> pulled;
  for (const OrderLine& line : lines) {
    std::int64_t& before = pulled[{line.unit, line.group, line.owner, line.rank}];
    if (line.is_push) {
      ages[{line.unit, line.group, line.owner}].push_back(line.version - before);
    } else {
      before = line.version;
    }
  }
  EXPECT_FALSE(ages.empty());
  for (const auto& [shard, of_shard] : ages) EXPECT_EQ(of_shard, timeline.ages()) << std::get<0>(shard);
}

struct Played {
  std::vector<std::vector<double>> losses{kRanks};      ///< [rank][step]
  std::vector<std::vector<std::int64_t>> ages{kRanks};  ///< [rank][step]
  Values values;
};

/// Trains on threads. Each rank makes its own number of steps.
Played play(const Strategy& strategy, const OrderOption& option, const std::vector<std::size_t>& steps) {
  Played played;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, option.model);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t i = 0; i < steps[rank]; ++i) {
      const StepResult step = testing::make_step(session, option, i);
      played.losses[rank].push_back(step.loss);
      played.ages[rank].push_back(step.staleness_max);
      EXPECT_EQ(step.staleness_mean, static_cast<double>(step.staleness_max)) << "all shards have one age";
    }
    // The order has no read that comes after a rank's last step. Such a read waits for the pushes of all ranks.
    Values values = session.values();
    if (mesh.rank() == 0) played.values = std::move(values);
  });
  return played;
}

/// Simulates a run, plays its order, and compares the results with plain LibTorch. `servers` is 0 if ranks own the
/// shards.
void expect_the_bits_of_plain_libtorch(const OrderOption& option, int servers) {
  const TestFolder folder;
  const std::string file = folder / "order.jsonl";
  Strategy strategy = testing::servers_test::served(option.adjust);
  strategy.sync.asynchronous.owners = servers > 0 ? ShardOwners::kServers : ShardOwners::kRanks;
  Tiny shapes = testing::make_tiny(option.model, /*deferred=*/true);
  const MemoryPlan plan = plan_in_detail(*shapes, strategy, one_host(kRanks));
  const SimulatedOrder order = value_or_throw(SimulatedOrder::make(plan, profile_of(plan), servers));
  const ModeTimeline timeline = timeline_of(strategy.sync.asynchronous);
  throw_if_error(order.write_file(timeline, file, Existing::kKept));
  const std::vector<OrderLine> lines = testing::read_lines(file);
  EXPECT_EQ(lines.size(), 2 * timeline.steps.size() * order.shards().size());
  expect_ages_of_shards(lines, timeline);
  const std::vector<std::size_t> steps = steps_of(timeline);
  const OrderHead head = value_or_throw(read_order_head(file));
  EXPECT_EQ(head.ranks, kRanks);
  EXPECT_EQ(head.steps, std::vector<std::int64_t>(steps.begin(), steps.end()));

  strategy.sync.asynchronous.play_order = file;
  std::optional<testing::servers_test::Servers> running;
  if (servers > 0) running.emplace(servers);
  const Played played = play(strategy, option, steps);
  testing::OrderOracle oracle(strategy, kRanks, option, servers);
  oracle.play(lines);
  EXPECT_EQ(played.losses, oracle.losses());
  EXPECT_TRUE(testing::all_same_bits(played.values, oracle.values()));
  EXPECT_EQ(played.ages, ages_of(timeline));
}

TEST(SimulatedOrder, RanksOfOneProcessPlayItToTheBitsOfPlainLibTorch) {
  at::set_num_threads(1);
  for (const OrderOption& option : testing::order_options()) {
    const std::string name = option.name;
    if (name != "adamw" && name != "compensated adaptively, inverse, clipped" && name != "at most one step ahead" &&
        name != "in rank order")
      continue;
    for (const int servers : {0, kServers}) {
      SCOPED_TRACE(name + ", servers: " + std::to_string(servers));
      expect_the_bits_of_plain_libtorch(option, servers);
    }
  }
}

TEST(SimulatedOrder, RulesOfWholeTensorsPlayItToTheBitsOfPlainLibTorch) {
  at::set_num_threads(1);
  for (const OrderOption& option : testing::whole_order_options()) {
    if (option.own_rules.matrices != nullptr) continue;  // servers have no rules of the program
    for (const int servers : {0, kServers}) {
      SCOPED_TRACE(std::string(option.name) + ", servers: " + std::to_string(servers));
      expect_the_bits_of_plain_libtorch(option, servers);
    }
  }
}

TEST(SimulatedOrder, RanksThatDifferMakeDifferentNumbersOfSteps) {
  const std::vector<std::size_t> free = steps_of(timeline_of({}));
  EXPECT_GT(free.front(), free.back()) << "so the other tests play an order of ranks that differ";
  EXPECT_EQ(steps_of(timeline_of({.max_staleness = 0})), (std::vector<std::size_t>{4, 4, 4}));
}

TEST(SimulatedOrder, StepBeyondTheOrderIsRefused) {
  const TestFolder folder;
  Strategy strategy = testing::servers_test::served(testing::servers_test::sgd);
  strategy.sync.asynchronous.owners = ShardOwners::kRanks;
  Tiny shapes = testing::make_tiny({}, /*deferred=*/true);
  const MemoryPlan plan = plan_in_detail(*shapes, strategy, one_host(kRanks));
  const ModeTimeline timeline = timeline_of({});
  throw_if_error(value_or_throw(SimulatedOrder::make(plan, profile_of(plan), 0))
                     .write_file(timeline, folder / "order.jsonl", Existing::kKept));
  strategy.sync.asynchronous.play_order = folder / "order.jsonl";
  std::vector<std::size_t> steps = steps_of(timeline);
  ++steps[1];
  EXPECT_THAT(testing::error_of([&] { play(strategy, {}, steps); }),
              HasSubstr("(sync.play_order) has no more of it by rank 1"));
}

TEST(SimulatedOrder, RanksWithoutPushesOfTheirOwnAreRefused) {
  const auto error_with = [](const testing::Adjust& adjust, int ranks) {
    Strategy strategy = testing::servers_test::served(adjust);
    Tiny shapes = testing::make_tiny({}, /*deferred=*/true);
    const MemoryPlan plan = plan_in_detail(*shapes, strategy, one_host(ranks));
    const auto order = SimulatedOrder::make(plan, profile_of(plan), /*servers=*/1);
    EXPECT_EQ(exit_code_of(order.status()), ExitCode::kConfig);
    return message_of(order.status());
  };
  const auto with_type = [&](SyncType type) {
    return error_with([type](Strategy& s) { s.sync = {.type = type}; }, kRanks);
  };
  for (const SyncType type : {SyncType::kEachStep, SyncType::kBackups, SyncType::kHogwild})
    EXPECT_THAT(with_type(type), HasSubstr("simulate --order: an order is one of ranks that push by themselves"));
  EXPECT_THAT(error_with([](Strategy& s) { s.sync.asynchronous.elastic = true; }, 1), HasSubstr("\"elastic\""));
}

}  // namespace simulated_order_test
}  // namespace tessera::app
