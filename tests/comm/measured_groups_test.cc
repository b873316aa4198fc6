// Tests how ranks measure collective algorithms. All ranks must then choose the same algorithm.

#include "runtime/comm/rounds/measured_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/rounds/timed_calls.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera {
namespace {

/// Returns the choices of `choose` for calls of 4 ranks.
std::vector<Algorithm> choices(const ChooseAlgorithm& choose) {
  std::vector<Algorithm> chosen;
  for (std::size_t bytes = 16; bytes <= 1 << 24; bytes *= 4)
    for (const Operation operation : {Operation::kAllGather, Operation::kReduceScatter, Operation::kAllReduce})
      chosen.push_back(choose(operation, 4, DType::kF32, bytes));
  return chosen;
}

// A transport of threads asks for no algorithm, so the test asks instead.
TEST(MeasuredGroups, AllRanksChooseAlikeFromOneMeasurement) {
  constexpr int kRanks = 4;
  std::mutex mutex;
  std::vector<std::vector<Algorithm>> of_ranks;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, kRanks);
    ASSERT_TRUE(axes.ok());
    std::vector<ChooseAlgorithm> given;
    const auto join = measured_groups(
        [&](const Group& group, ChooseAlgorithm choose) -> absl::StatusOr<std::shared_ptr<Collectives>> {
          given.push_back(std::move(choose));
          return group.name == "first" ? axes->world : nullptr;  // the second group cannot be measured
        });
    Group group;
    group.name = "first";
    group.rank = mesh.rank();
    group.world_ranks = {0, 1, 2, 3};
    group.world_size = kRanks;
    ASSERT_TRUE(join(group).ok());
    group.name = "second";
    ASSERT_TRUE(join(group).ok());
    ASSERT_EQ(given.size(), 2u);
    EXPECT_EQ(choices(given[0]), choices(given[1]));
    const std::lock_guard lock(mutex);
    of_ranks.push_back(choices(given[0]));
  });
  ASSERT_EQ(of_ranks.size(), 4u);
  for (const auto& chosen : of_ranks) EXPECT_EQ(chosen, of_ranks.front());
}

/// A group on a slow network: each call takes 5 ms.
class SlowGroup : public ForwardingCollectives {
 public:
  using ForwardingCollectives::ForwardingCollectives;
  std::size_t most_bytes() const { return most_bytes_; }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    most_bytes_ = std::max(most_bytes_, call.bytes_per_rank);
    return ForwardingCollectives::do_all_gather(call);
  }
  Work do_reduce(const ReduceCall& call) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return ForwardingCollectives::do_reduce(call);
  }

 private:
  std::size_t most_bytes_ = 0;
};

TEST(MeasuredGroups, SlowCallsAreNotTimedForLargerSizes) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, 2);
    ASSERT_TRUE(axes.ok());
    const auto slow = std::make_shared<SlowGroup>(axes->world);
    const auto join = measured_groups(
        [&](const Group&, ChooseAlgorithm) { return absl::StatusOr<std::shared_ptr<Collectives>>(slow); });
    Group group;
    group.rank = mesh.rank();
    group.world_ranks = {0, 1};
    group.world_size = 2;
    ASSERT_TRUE(join(group).ok());
    EXPECT_EQ(slow->most_bytes(), 512u);  // calls of 4 KiB would take two more seconds if they were 8 times as slow
  });
}

TEST(MeasuredGroups, FirstGroupsErrorIsReturned) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const auto join = measured_groups([](const Group& group, ChooseAlgorithm) {
      return absl::StatusOr<std::shared_ptr<Collectives>>(
          make_error(ExitCode::kPeerLost, group.self() + " cannot be reached"));
    });
    Group group;
    group.rank = mesh.rank();
    group.world_ranks = {0, 1};
    group.world_size = 2;
    EXPECT_EQ(exit_code_of(join(group).status()), ExitCode::kPeerLost);
  });
}

TEST(TimedCalls, CoverAllAlgorithmsOfAllCollectives) {
  // A call with few bytes has 3 algorithms for all_gather. For fp32 it has 2 for reduce_scatter and 3 for all_reduce,
  // and as many for bf16. With many bytes, all_reduce has no doubling, so it has 2 algorithms.
  EXPECT_EQ(calls_to_time(4, 64).size(), 13u);
  const std::vector<TimedCall> calls = calls_to_time(3, 1 << 20);
  EXPECT_EQ(calls.size(), 11u);
  for (const TimedCall& call : calls) {
    const std::size_t even = call.operation == Operation::kAllGather ? 1 : 3 * size_of(call.dtype);
    EXPECT_EQ(call.bytes % even, 0u);
    EXPECT_EQ(call.median_s(), 0);
  }
}

}  // namespace
}  // namespace tessera
