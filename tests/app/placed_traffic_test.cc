// Tests the list of collectives of `tessera plan`: a step makes exactly these collectives, to the byte, under every
// legal placement of a 2 x 2 mesh.

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "engine/detailed_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/placement_rows.h"
#include "tests/support/legal_placements.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/counted_collectives.h"
#include "workshop/app/plan/step_traffic.h"

namespace tessera::app {
namespace placed_traffic_test {

using testing::CallsOfGroups;
using testing::CountedCollectives;

constexpr int kRanks = 4, kRanksOfHost = 2;

struct Moved {
  std::int64_t calls = 0, bytes = 0;
  friend bool operator==(const Moved&, const Moved&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Moved& moved) {
    return out << moved.calls << " calls, " << moved.bytes << " bytes";
  }
};
using MovedByGroup = std::map<std::string, Moved>;  ///< "gather", "reduce", "replicate", "secondary"

/// Sums up the collectives that a plan lists, and counts their bytes as CountedCollectives does: an all-gather counts
/// with the bytes of one rank's part.
MovedByGroup planned_traffic(const MemoryPlan& plan) {
  MovedByGroup all;
  for (const StepCollective& each : collectives_of_step(plan)) {
    const bool gathers = each.operation == "all_gather";
    const MeshPosition& mesh = plan.placement().mesh;
    const bool of_copy = each.axis == "secondary";
    const int ranks = of_copy                ? plan.placement().secondary.ranks
                      : each.axis == "shard" ? mesh.shard_size
                                             : mesh.replicate_size;
    Moved& moved = all[of_copy || each.axis == "replicate" ? each.axis : gathers ? "gather" : "reduce"];
    moved.calls += each.calls;
    moved.bytes += gathers ? each.bytes / ranks : each.bytes;
  }
  return all;
}

/// Returns the traffic that rank 0 makes in the third step, by group.
MovedByGroup counted_traffic(const Strategy& strategy) {
  std::mutex mutex;
  std::vector<std::unique_ptr<CallsOfGroups>> counts;
  thread_local CallsOfGroups* own = nullptr;
  const auto wrap = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
    const std::lock_guard lock(mutex);
    own = counts.emplace_back(std::make_unique<CallsOfGroups>()).get();
    return testing::wrapped_groups(std::move(factory), [counted = own](const std::string& use, auto group) {
      return std::make_shared<CountedCollectives>(std::move(group), (*counted)[use]);
    });
  };
  MovedByGroup moved;
  run_ranks({.ranks = kRanks, .hosts = kRanks / kRanksOfHost, .wrap_groups = wrap}, [&](const Mesh& mesh) {
    testing::Session session(mesh, strategy);
    for (std::size_t i = 0; i < 2; ++i) session.train(i);
    const CallsOfGroups before = *own;
    session.train(2);
    if (mesh.rank() != 0) return;
    for (const char* const use : {"gather", "reduce", "replicate", "secondary"}) {
      const testing::Calls now = (*own)[use];
      const testing::Calls then = before.contains(use) ? before.at(use) : testing::Calls{};
      if (now.calls > then.calls) moved[use] = {now.calls - then.calls, now.bytes - then.bytes};
    }
  });
  return moved;
}

TEST(PlacedTraffic, StepOfEveryLegalPlacementMovesWhatThePlanLists) {
  Topology topology;
  topology.world_size = kRanks;
  topology.local_world_size = kRanksOfHost;
  topology.launcher = "thread";
  for (const PlacementConfig& placement : testing::legal_placements()) {
    for (const std::int64_t microbatches : {1, 2}) {
      Strategy strategy = testing::strategy_for(ShardingStrategy::kFullShard);
      strategy.gradient_accumulation = microbatches;
      strategy.placement = placement;
      testing::Tiny shapes = testing::make_tiny({}, true);
      const MovedByGroup planned = planned_traffic(plan_in_detail(*shapes, strategy, topology));
      EXPECT_EQ(counted_traffic(strategy), planned)
          << describe_placement(strategy) << ", " << microbatches << " microbatches";
    }
  }
}

// All gathers of a step stay inside a host, except for the first gather of each unit.
TEST(PlacedTraffic, StepWithASecondCopyMovesWhatThePlanLists) {
  Topology topology;
  topology.world_size = kRanks;
  topology.local_world_size = kRanksOfHost;
  topology.launcher = "thread";
  for (const SecondaryForm form : {SecondaryForm::kNone, SecondaryForm::kPlain, SecondaryForm::kInt8}) {
    for (const std::int64_t microbatches : {1, 2}) {
      Strategy strategy = testing::strategy_for(ShardingStrategy::kFullShard);
      strategy.gradient_accumulation = microbatches;
      strategy.prefetch = 0;
      strategy.secondary.form = form;
      testing::Tiny shapes = testing::make_tiny({}, true);
      const MemoryPlan plan = plan_in_detail(*shapes, strategy, topology);
      const MovedByGroup planned = planned_traffic(plan), counted = counted_traffic(strategy);
      EXPECT_EQ(counted, planned) << "form " << static_cast<int>(form) << ", " << microbatches << " microbatches";
      if (form == SecondaryForm::kNone) continue;
      const auto units = static_cast<std::int64_t>(plan.units().size());
      EXPECT_EQ(counted.at("gather").calls, units) << "a unit goes over the network once";
      EXPECT_GT(counted.at("secondary").calls, 0);
    }
  }
}

TEST(PlacedTraffic, RanksOfAReplicaGatherValuesAndSumGradientsAmongThemselves) {
  Topology topology;
  topology.world_size = kRanks;
  topology.local_world_size = kRanksOfHost;
  topology.launcher = "thread";
  Strategy strategy = testing::strategy_for(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.sync.type = SyncType::kAsynchronous;
  strategy.sync.asynchronous.owners = ShardOwners::kServers;
  testing::Tiny shapes = testing::make_tiny({}, true);
  EXPECT_TRUE(collectives_of_step(plan_in_detail(*shapes, strategy, topology)).empty()) << "servers are no collective";
  strategy.sync.asynchronous.replica_ranks = 2;
  const MemoryPlan plan = plan_in_detail(*shapes, strategy, topology);
  const std::vector<StepCollective> all = collectives_of_step(plan);
  ASSERT_EQ(all.size(), 2u);
  for (const StepCollective& each : all) {
    EXPECT_EQ(each.axis, "replica");
    EXPECT_EQ(each.bytes, 2 * plan.served_bytes().received);
  }
}

}  // namespace placed_traffic_test
}  // namespace tessera::app
