#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <numeric>
#include <vector>

#include "runtime/comm/group.h"
#include "tests/support/fork_ranks.h"

namespace tessera {

/// A limit in seconds that no test reaches. If ranks hang, tests end them much earlier (ForkedRanks::wait).
constexpr double kNeverPassed = 3600;

/// Returns the group of all `ranks` forked ranks.
inline Group world_of(int rank, int ranks, double timeout_s = kNeverPassed) {
  Group group;
  group.name = "world";
  group.rank = rank;
  group.world_ranks.resize(ranks);
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  group.world_size = ranks;
  group.timeout_s = timeout_s;
  group.init_timeout_s = kNeverPassed;
  return group;
}

inline void expect_all_ok(const std::vector<RankEnd>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) expect_ok(ends[rank], static_cast<int>(rank));
}

}  // namespace tessera
