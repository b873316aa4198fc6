// Tests the cuda_host transport on an emulated GPU, with ranks on threads.

#include <gmock/gmock.h>

#include <chrono>
#include <numeric>

#include "runtime/comm/cuda_host/cuda_host_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"
#include "tests/support/limits/patience.h"
#include "tests/support/stand_ins/emulated_peer_device.h"
#include "tests/support/stand_ins/wrapped_groups.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Group group_of(const Mesh& mesh, const std::string& name) {
  Group group;
  group.name = name;
  group.rank = mesh.rank();
  group.world_ranks.resize(static_cast<std::size_t>(mesh.world_size()));
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  group.world_size = mesh.world_size();
  return group;
}

std::shared_ptr<Collectives> join(const Mesh& mesh, const std::string& name = "test") {
  auto axes = groups_of(mesh).axes(1, mesh.world_size());
  require_ok(axes.status());
  auto group = cuda_host_collectives(group_of(mesh, name), axes->world, std::make_unique<EmulatedPeerDevice>());
  require_ok(group.status());
  return *std::move(group);
}

class CudaHost : public ::testing::TestWithParam<int> {};

TEST_P(CudaHost, EveryOperationIsExact) {
  run_ranks({.ranks = GetParam()}, [](const Mesh& mesh) {
    check_all_operations(*join(mesh), false, 8200);
    check_all_operations(*join(mesh), true, 8200);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaHost, ::testing::Values(2, 3, 4, 8));

TEST(CudaHost, NothingMovesBeforeTheWait) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto group = join(mesh);
    const auto mine = static_cast<std::byte>(mesh.rank() + 1);
    std::array<std::byte, 2> all{};
    Work work = group->all_gather("late", &mine, all.data(), 1);
    require(all == std::array<std::byte, 2>{}, "moved early: the emulation shows nothing");
    require_ok(work.wait());
    require(all == std::array{std::byte{1}, std::byte{2}}, "not there after the wait");
  });
}

TEST(CudaHost, ManyCallsUnderWayAreExact) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    const auto group = join(mesh);
    std::array<float, 100> inputs{}, outputs{};
    std::deque<Work> under_way;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = static_cast<float>(i) + static_cast<float>(mesh.rank());
      under_way.push_back(group->all_reduce("sum", &inputs[i], DType::kF32, &outputs[i], 1, Waits::kLater));
      if (under_way.size() < 30) continue;
      require_ok(under_way.front().wait());
      under_way.pop_front();
    }
    for (Work& work : under_way) require_ok(work.wait());
    for (std::size_t i = 0; i < outputs.size(); ++i) require(outputs[i] == 3.0f * static_cast<float>(i) + 3.0f, "sum");
  });
}

TEST(CudaHost, InPlaceSumsAllocateNothingAfterTheFirstStep) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 2);
    require_ok(axes.status());
    auto device = std::make_unique<EmulatedPeerDevice>();
    const EmulatedPeerDevice& gpu = *device;
    auto group = cuda_host_collectives(group_of(mesh, "test"), axes->world, std::move(device));
    require_ok(group.status());
    std::vector<std::vector<float>> units = {std::vector<float>(4000), std::vector<float>(10), std::vector<float>(1500),
                                             std::vector<float>(10), std::vector<float>(1500)};
    int after_first = 0;
    for (int step = 0; step < 20; ++step) {
      std::deque<Work> under_way;
      for (std::vector<float>& unit : units) {
        const auto start = [&] {
          return (*group)->all_reduce("unit", unit.data(), DType::kF32, unit.data(), unit.size(), Waits::kLater);
        };
        under_way.push_back(start());
        if (under_way.size() < 3) continue;
        require_ok(under_way.front().wait());
        under_way.pop_front();
      }
      for (Work& work : under_way) require_ok(work.wait());
      if (step == 0) after_first = gpu.allocations;
    }
    // If a small sum uses the only large block, another large block may have to be allocated.
    require(gpu.allocations <= after_first + 2, std::to_string(gpu.allocations) + " allocations");
  });
}

TEST(CudaHost, RanksThatDisagreeAllLearnBothCalls) {
  EXPECT_THAT(
      [] {
        run_ranks({.ranks = 2}, [](const Mesh& mesh) {
          const auto group = join(mesh);
          std::vector<std::byte> shard(64), full(128);
          const std::size_t bytes = mesh.rank() == 0 ? 32 : 64;
          const absl::Status status = group->all_gather("blocks.3", shard.data(), full.data(), bytes).wait();
          require(!status.ok(), "no error");
          throw std::runtime_error(std::string(status.message()));
        });
      },
      ::testing::ThrowsMessage<std::runtime_error>(
          AllOf(HasSubstr("blocks.3"), HasSubstr("of 32 bytes"), HasSubstr("of 64 bytes"))));
}

// Groups are made as a job makes them, so that the watch over calls sees them.
TEST(CudaHost, RanksWaitingInDifferentGroupsAreNamed) {
  const auto on_gpu = [](const std::string& use, std::shared_ptr<Collectives> host) {
    if (host->size() == 1) return host;
    const Group group{.name = use, .rank = host->rank(), .world_ranks = {0, 1}, .world_size = 2};
    auto made = cuda_host_collectives(group, std::move(host), std::make_unique<EmulatedPeerDevice>());
    require_ok(made.status());
    return *std::move(made);
  };
  const auto wrap = [&](std::shared_ptr<GroupFactory> groups) {
    return testing::wrapped_groups(std::move(groups), on_gpu);
  };
  run_ranks({.ranks = 2, .wrap_groups = wrap}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 2);
    require_ok(axes.status());
    require(axes->world->transport() == "cuda_host", axes->world->transport());
    std::vector<float> full(200);
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status =
        mesh.rank() == 0 ? axes->gather->all_gather("blocks.3", full.data(), full.data(), 400).wait()
                         : axes->reduce->reduce_scatter("head", full.data(), DType::kF32, full.data(), 100).wait();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_EQ(exit_code_of(status), ExitCode::kInternal);
    EXPECT_THAT(message_of(status),
                AllOf(HasSubstr("rank 0 waits in all_gather 'blocks.3' of 400 bytes (#1), which rank 1 has not begun"),
                      HasSubstr("rank 1 waits in reduce_scatter 'head' of 100 fp32 (#1), which rank 0 has not begun")));
    EXPECT_TRUE(in_time(seconds, 10)) << seconds << " s";
  });
}

TEST(CudaHost, RankThatGivesUpEndsTheOthers) {
  EXPECT_THAT(
      [] {
        run_ranks({.ranks = 3}, [](const Mesh& mesh) {
          const auto group = join(mesh);
          if (mesh.rank() == 1) throw std::runtime_error("rank 1 has no data");
          const absl::Status status = group->barrier("together").wait();
          require(!status.ok(), "no error");
          require(std::string(status.message()).find("rank 1") != std::string::npos, std::string(status.message()));
        });
      },
      ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("rank 1 has no data")));
}

TEST(CudaHost, SumsOfOtherDtypesAreRefused) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto group = join(mesh);
    std::array<float, 2> values{};
    const absl::Status status = group->all_reduce("sum", values.data(), DType::kI64, values.data(), 2).wait();
    require(std::string(status.message()).find("fp32, bf16 or fp16") != std::string::npos,
            std::string(status.message()));
  });
}

TEST(CudaHost, MoreRanksThanTheKernelsSupportAreRefused) {
  Group group;
  group.world_size = 9;
  for (int rank = 0; rank < 9; ++rank) group.world_ranks.push_back(rank);
  const auto made = cuda_host_collectives(group, nullptr, nullptr);
  EXPECT_THAT(std::string(made.status().message()), AllOf(HasSubstr("at most 8"), HasSubstr("got 9")));
}

}  // namespace
}  // namespace tessera
