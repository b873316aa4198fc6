// Tests groups that are made of other groups (hierarchical), that have one rank (solo), or that only count the bytes
// that other ranks would send (fake).

#include <gmock/gmock.h>

#include <numeric>

#include "runtime/base/status.h"
#include "runtime/comm/local/fake_mesh.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"

namespace tessera {
namespace {

struct Hosts {
  int ranks, hosts;
};

class Hierarchical : public ::testing::TestWithParam<Hosts> {};

// Hosts have 1, 2 or 4 ranks. These are powers of two, so sums must have the same bits as those of the flat tree.
TEST_P(Hierarchical, EveryOperationGivesTheBitsOfTheFlatGroup) {
  const auto [ranks, hosts] = GetParam();
  run_ranks({.ranks = ranks, .hosts = hosts}, [hosts = hosts, ranks = ranks](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    const bool mixed = hosts > 1 && hosts < ranks;
    require(axes->world->transport() == (mixed ? "hierarchical(thread, thread)" : "thread"), axes->world->transport());
    require(axes->world->rank() == mesh.rank() && axes->world->size() == mesh.world_size(), "numbering");
    check_all_operations(*axes->world, false, 20001);
    check_all_operations(*axes->reduce, true, 8200);
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, Hierarchical, ::testing::Values(Hosts{4, 2}, Hosts{6, 3}, Hosts{8, 2}, Hosts{3, 3}));

/// Hosts have 2 and 3 ranks. Groups inside a host have their own memory. The group of all ranks is not hierarchical, so
/// it adds in the order of a group on one host.
TEST(UnequalHosts, EveryOperationGivesTheBitsOfTheFlatGroup) {
  run_ranks({.ranks = 5, .ranks_of_hosts = {2, 3}}, [](const Mesh& mesh) {
    require(mesh.topology().host == (mesh.rank() < 2 ? 0 : 1), "hosts");
    auto axes = groups_of(mesh).axes(1, 5);
    require_ok(axes.status());
    require(axes->world->transport() == "thread" && !axes->world->shares_memory(), axes->world->transport());
    check_all_operations(*axes->world, false, 20001);
    check_all_operations(*axes->reduce, true, 8200);
  });
}

TEST(UnequalHosts, ShardGroupsInsideHostsShareMemory) {
  run_ranks({.ranks = 6, .ranks_of_hosts = {2, 4}}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(3, 2);
    require_ok(axes.status());
    require(axes->gather->shares_memory() && !axes->replicate->shares_memory(), "who shares memory");
  });
}

TEST(HierarchicalTest, FailureOfOneRankReachesEveryHost) {
  std::vector<absl::Status> results(4);
  run_ranks({.ranks = 4, .hosts = 2}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 4);
    require_ok(axes.status());
    if (mesh.rank() == 3) return axes->world->abort(make_error(ExitCode::kIo, "no disk"));
    results[mesh.rank()] = axes->world->barrier("step").wait();
  });
  for (int rank : {0, 1, 2}) EXPECT_FALSE(results[rank].ok()) << rank;
  EXPECT_THAT(message_of(results[1]) + message_of(results[2]), ::testing::HasSubstr("no disk"));
}

TEST(Solo, OneRankGetsItsInputBack) {
  LocalCollectives solo;
  EXPECT_EQ(solo.transport(), "solo");
  check_all_operations(solo, false, 1037);
  check_common_memory(solo, 1037);
  EXPECT_EQ(solo.bytes_received(), 0u);
}

TEST(Fake, OwnPartIsDoneAndOtherBytesAreCounted) {
  LocalCollectives fake(2, 1000);
  std::vector<std::byte> shard(8, std::byte{7}), full(8000);
  ASSERT_TRUE(fake.all_gather("", shard.data(), full.data(), 8).wait().ok());
  EXPECT_EQ(full[2 * 8], std::byte{7});
  EXPECT_EQ(full[0], std::byte{0});
  EXPECT_EQ(fake.bytes_received(), 999u * 8);
  std::vector<float> input(4000), output(4);
  input[2 * 4] = 5;
  ASSERT_TRUE(fake.reduce_scatter("", input.data(), DType::kF32, output.data(), 4).wait().ok());
  EXPECT_EQ(output[0], 5);
  EXPECT_EQ(fake.bytes_received(), 999u * (8 + 16));
}

TEST(Fake, VisitorSeesTheOutputUnchanged) {
  LocalCollectives fake(1, 3);
  std::vector<float> input(3000);
  std::iota(input.begin(), input.end(), 0.0f);
  RecordingVisitor visitor(1000);
  ASSERT_TRUE(fake.reduce_scatter("", input.data(), DType::kF32, input.data() + 1000, 1000, &visitor).wait().ok());
  EXPECT_EQ(visitor.seen(), std::vector<float>(input.begin() + 1000, input.begin() + 2000));
}

TEST(CommonMemory, ExistsOnlyForRanksOfOneHost) {
  run_ranks({.ranks = 4, .hosts = 2}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(2, 2);
    require_ok(axes.status());
    require(axes->gather->shares_memory() && !axes->world->shares_memory(), "who shares memory");
    require_ok(axes->gather->allocate_common(64).status());
    require(exit_code_of(axes->world->allocate_common(64).status()) == ExitCode::kUnavailable, "across hosts");
  });
  Topology topology;
  topology.world_size = 8;
  topology.local_world_size = 4;
  auto axes = groups_of(fake_mesh(topology)).axes(2, 4);
  ASSERT_TRUE(axes.ok());
  EXPECT_TRUE(axes->gather->shares_memory());
  EXPECT_TRUE(axes->gather->allocate_common(64).ok());
  EXPECT_FALSE(axes->replicate->shares_memory());
  EXPECT_EQ(exit_code_of(axes->world->allocate_common(64).status()), ExitCode::kUnavailable);
}

TEST(Fake, MeshOf1024RanksHasItsAxes) {
  Topology topology;
  topology.rank = 517;
  topology.world_size = 1024;
  topology.local_world_size = 8;
  auto axes = groups_of(fake_mesh(topology)).axes(128, 8);
  ASSERT_TRUE(axes.ok());
  EXPECT_EQ(axes->gather->size(), 8);
  EXPECT_EQ(axes->gather->rank(), 5);
  EXPECT_EQ(axes->replicate->rank(), 64);
  EXPECT_EQ(axes->world->rank(), 517);
}

}  // namespace
}  // namespace tessera
