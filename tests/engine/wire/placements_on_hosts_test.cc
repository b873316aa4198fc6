// Tests that every legal placement trains to the same bits if Gloo joins hosts and shared memory joins the ranks of
// each host.

#include <gtest/gtest.h>

#include "runtime/config/placement_rows.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/legal_placements.h"

namespace tessera::testing {
namespace placements_on_hosts_test {

TEST(PlacementsOnHosts, EveryLegalOneHasTheSameBits) {
  on_hosts(4, 2, [](const Mesh& mesh) {
    FirstValues first;
    bool shared = false;
    for (const PlacementConfig& placement : legal_placements()) {
      Strategy strategy = strategy_for(Placed(ShardingStrategy::kFullShard, shared));
      strategy.placement = placement;
      require(first.same_bits(trained(mesh, strategy, 2)), describe_placement(strategy) + " has other bits");
      shared = !shared;  // making connections takes longer than steps, so each case has one of the two settings
    }
  });
}

}  // namespace placements_on_hosts_test
}  // namespace tessera::testing
