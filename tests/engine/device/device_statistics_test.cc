// Tests "broadcast_buffers": "microbatch_order" on an emulated GPU. Parameters and running statistics have the bits of
// one rank on the CPU.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/engine/files/normed_runs.h"

namespace tessera::testing {
namespace device_statistics_test {

using reproducible_test::in_order;
using reproducible_test::train_normed;

/// Trains on ranks that are threads. Returns the bytes of parameters and buffers of each rank.
std::vector<std::string> bytes_of_ranks(const ThreadRanks& ranks, const Strategy& strategy) {
  std::vector<std::string> each(static_cast<std::size_t>(ranks.ranks));
  run_ranks(ranks, [&](const Mesh& mesh) {
    each[static_cast<std::size_t>(mesh.rank())] = train_normed(mesh, strategy).bytes;
  });
  return each;
}

TEST(DeviceStatistics, AnyNumberOfRanksGivesTheBitsOfOneOnTheCpu) {
  const auto of = [](const Placed& placed, int ranks) {
    return in_order(placed, GradientSync::kLastMicrobatch, ranks);
  };
  const std::string wanted = bytes_of_ranks({}, of(ShardingStrategy::kFullShard, 1))[0];
  ASSERT_FALSE(wanted.empty());
  for (const Placed& placed : {Placed(ShardingStrategy::kNoShard), Placed(ShardingStrategy::kFullShard)}) {
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(name_of(placed) + " on " + std::to_string(ranks));
      const EmulatedGpus gpus;
      const Strategy strategy = of(placed, ranks);
      for (const std::string& bytes : bytes_of_ranks(late({.ranks = ranks}), strategy)) EXPECT_TRUE(bytes == wanted);
      if (ranks == 1) continue;
      for (const std::string& bytes : bytes_of_ranks(on_one_gpu({.ranks = ranks}), strategy))
        EXPECT_TRUE(bytes == wanted) << "on one GPU";
    }
  }
}

}  // namespace device_statistics_test
}  // namespace tessera::testing
