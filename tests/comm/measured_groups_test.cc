// Tests how ranks measure collective algorithms. All ranks must then choose the same algorithm.

#include "runtime/comm/rounds/measured_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/forwarding_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/rounds/timed_calls.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

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

/// A group on a slow network: each call takes some time more.
class SlowGroup : public ForwardingCollectives {
 public:
  using Pause = std::chrono::milliseconds;
  SlowGroup(std::shared_ptr<Collectives> group, Pause of_gather, Pause of_reduction)
      : ForwardingCollectives(std::move(group)), of_gather_(of_gather), of_reduction_(of_reduction) {}

  std::size_t most_bytes() const { return most_bytes_; }
  int gathers() const { return gathers_; }
  int reductions() const { return reductions_; }

 protected:
  Work do_all_gather(const GatherCall& call) override {
    std::this_thread::sleep_for(of_gather_);
    most_bytes_ = std::max(most_bytes_, call.bytes_per_rank);
    ++gathers_;
    return ForwardingCollectives::do_all_gather(call);
  }
  Work do_reduce(const ReduceCall& call) override {
    std::this_thread::sleep_for(of_reduction_);
    ++reductions_;
    return ForwardingCollectives::do_reduce(call);
  }

 private:
  const Pause of_gather_, of_reduction_;
  std::size_t most_bytes_ = 0;
  int gathers_ = 0, reductions_ = 0;
};

Group group_with(const Mesh& mesh, std::vector<int> world_ranks) {
  Group group;
  group.rank = mesh.rank();
  group.world_size = static_cast<int>(world_ranks.size());
  group.world_ranks = std::move(world_ranks);
  return group;
}

TEST(MeasuredGroups, SlowCallsAreNotTimedForLargerSizes) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, 2);
    ASSERT_TRUE(axes.ok());
    const auto slow = std::make_shared<SlowGroup>(axes->world, 5ms, 5ms);
    const auto join = measured_groups(
        [&](const Group&, ChooseAlgorithm) { return absl::StatusOr<std::shared_ptr<Collectives>>(slow); });
    ASSERT_TRUE(join(group_with(mesh, {0, 1})).ok());
    EXPECT_EQ(slow->most_bytes(), 512u);  // calls of 4 KiB would take two more seconds if they were 8 times as slow
  });
}

TEST(MeasuredGroups, SetsOfRanksThatMayNotMeasureMakeNoCall) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    std::vector<int> asked;
    bool is_direct = false;
    const MeasureRule rule{.may_measure = [&](const Group& group) {
      asked = group.world_ranks;
      return false;
    }};
    const auto join = measured_groups(
        [&](const Group&, const ChooseAlgorithm& choose) -> absl::StatusOr<std::shared_ptr<Collectives>> {
          is_direct = choose == nullptr;
          return nullptr;  // this group cannot make a call
        },
        rule);
    ASSERT_TRUE(join(group_with(mesh, {0, 1, 2})).ok());
    EXPECT_EQ(asked, std::vector({0, 1, 2}));
    EXPECT_TRUE(is_direct);
  });
}

// A call takes 50 ms. The timed calls of three ranks would take more than 100 times as long.
TEST(MeasuredGroups, NetworkThatTakesTooLongIsNotMeasured) {
  run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, 3);
    ASSERT_TRUE(axes.ok());
    const auto slow = std::make_shared<SlowGroup>(axes->world, 50ms, 50ms);
    std::vector<ChooseAlgorithm> given;
    const auto join = measured_groups(
        [&](const Group&, ChooseAlgorithm choose) {
          given.push_back(std::move(choose));
          return absl::StatusOr<std::shared_ptr<Collectives>>(slow);
        },
        {.most_seconds = 2});
    for (int time = 0; time < 2; ++time) ASSERT_TRUE(join(group_with(mesh, {0, 1, 2})).ok());
    EXPECT_EQ(slow->most_bytes(), 512u);
    EXPECT_EQ(slow->reductions(), 0);
    EXPECT_EQ(slow->gathers(), 5);  // the time left, a warm-up, two timed gathers, and the longest times of all ranks
    for (const ChooseAlgorithm& choose : given)
      for (const Algorithm chosen : choices(choose)) EXPECT_EQ(chosen, Algorithm::kDirect);
  });
}

// Gathers are fast, so the first set of ranks has a low estimate, and measures. Reductions then take all the time.
TEST(MeasuredGroups, SetsOfRanksShareTheirTime) {
  const double slow_by = slowness();
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, 2);
    ASSERT_TRUE(axes.ok());
    std::shared_ptr<SlowGroup> slow;
    ChooseAlgorithm given;
    const auto join = measured_groups(
        [&](const Group&, ChooseAlgorithm choose) {
          given = std::move(choose);
          slow = std::make_shared<SlowGroup>(axes->world, 0ms, SlowGroup::Pause(static_cast<int>(50 * slow_by)));
          return absl::StatusOr<std::shared_ptr<Collectives>>(slow);
        },
        {.most_seconds = slow_by});
    ASSERT_TRUE(join(group_with(mesh, {0, 1})).ok());
    EXPECT_GT(slow->reductions(), 0);
    EXPECT_EQ(slow->most_bytes(), 32u << 10);  // the estimate's largest call; measuring stops after calls of 512 bytes
    for (const Algorithm chosen : choices(given)) EXPECT_EQ(chosen, Algorithm::kDirect);
    ASSERT_TRUE(join(group_with(mesh, {2, 3})).ok());
    EXPECT_EQ(slow->reductions(), 0);
  });
}

// The choice by costs begins at the rule's size.
TEST(MeasuredGroups, SmallCallsGoDirectly) {
  run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, 3);
    ASSERT_TRUE(axes.ok());
    ChooseAlgorithm given;
    const auto join = measured_groups(
        [&](const Group&, ChooseAlgorithm choose) {
          given = std::move(choose);
          return absl::StatusOr<std::shared_ptr<Collectives>>(axes->world);
        },
        {.least_bytes = std::size_t{1} << 40});
    ASSERT_TRUE(join(group_with(mesh, {0, 1, 2})).ok());
    for (const Algorithm chosen : choices(given)) EXPECT_EQ(chosen, Algorithm::kDirect);
  });
}

TEST(MeasuredGroups, FirstGroupsErrorIsReturned) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const auto join = measured_groups([](const Group& group, ChooseAlgorithm) {
      return absl::StatusOr<std::shared_ptr<Collectives>>(
          make_error(ExitCode::kPeerLost, group.self() + " cannot be reached"));
    });
    EXPECT_EQ(exit_code_of(join(group_with(mesh, {0, 1})).status()), ExitCode::kPeerLost);
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
