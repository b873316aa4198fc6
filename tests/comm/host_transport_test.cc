// Tests collectives of processes over a host's shared memory: their results, their memory, and what ranks learn when a
// rank is killed, stopped or missing.

#include "runtime/comm/shared/host_transport.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "runtime/base/status.h"
#include "runtime/comm/meet_in_store.h"
#include "tests/comm/collectives_properties.h"
#include "tests/comm/forked_world.h"
#include "tests/support/fork_ranks.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::size_t shared_memory_files() {
  const std::filesystem::directory_iterator folder("/dev/shm");
  return std::distance(begin(folder), end(folder));
}

class HostCollectives : public ::testing::TestWithParam<int> {};

TEST_P(HostCollectives, EveryOperationIsExactOnGroupMemoryAndOnAnyOther) {
  const int ranks = GetParam();
  expect_all_ok(fork_ranks(ranks, [ranks](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, ranks), store));
    check_all_operations(*group, true, 20001);
    check_all_operations(*group, false, 20001);
    return absl::OkStatus();
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostCollectives, ::testing::Values(2, 3, 4, 8, 9));

// A MailboxWay tries both ways of writing in every eighth call with more than seven rounds. On two ranks, the first
// call of each check is such a call, even in bf16, since `tries` adds calls after each check until there are eight.
TEST(HostCollectivesTest, LargePrivateBuffersAreSummedThroughMailboxes) {
  for (const int ranks : {2, 3}) {
    expect_all_ok(fork_ranks(ranks, [ranks](int rank, KeyValueStore& store) -> absl::Status {
      TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, ranks), store));
      const std::size_t large = ranks == 2 ? 1'150'003 : 500'003, large_of_halves = ranks == 2 ? 2 * large : large;
      constexpr std::size_t kEightRounds = (7 << 19) + 1;  // bytes
      std::vector<std::byte> between(ranks * kEightRounds);
      const auto tries = [&](int calls, const auto& check) {
        check();
        for (int call = calls; call < 8; ++call)
          require_ok(group->all_gather("between", &between[rank * kEightRounds], between.data(), kEightRounds).wait());
      };
      for (const bool in_place : {false, true}) {
        tries(1, [&] { check_all_gather(*group, 4 * large, false, in_place); });
        tries(1, [&] { check_reduce_scatter(*group, DType::kF32, large, false, in_place); });
        tries(2, [&] { check_visited_sums(*group, DType::kF32, large, false, in_place); });
        tries(1, [&] { check_all_reduce(*group, DType::kF32, large, false, in_place); });
      }
      tries(1, [&] { check_reduce_scatter(*group, DType::kBF16, large_of_halves, false, false); });
      tries(1, [&] { check_all_reduce(*group, DType::kBF16, large_of_halves, false, false); });
      tries(ranks, [&] { check_broadcast(*group, 4 * large, false); });
      tries(1, [&] { check_all_to_all(*group, 4 * large, false); });
      // Most ranks have no data in the last window.
      check_all_reduce(*group, DType::kF32, (512 << 10) / 4 + 1, false, true);
      return absl::OkStatus();
    }));
  }
}

TEST(HostCollectivesTest, SmallSumsReadCommonMemoryBeforeAnyRankWrites) {
  expect_all_ok(fork_ranks(3, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 3), store));
    constexpr std::size_t kNumel = 1000;
    TESSERA_ASSIGN_OR_RETURN(auto common, group->allocate_common(4 * kNumel));
    auto* const input = reinterpret_cast<float*>(common->data());
    std::vector<float> own(kNumel);
    for (int round = 0; round < 200; ++round) {
      if (rank == 0) std::fill_n(input, kNumel, static_cast<float>(round));
      TESSERA_RETURN_IF_ERROR(group->barrier("filled").wait());
      float* const output = rank == 0 ? input : own.data();
      require_ok(group->all_reduce("sum", input, DType::kF32, output, kNumel).wait());
      for (std::size_t i = 0; i < kNumel; ++i) require(output[i] == static_cast<float>(3 * round), "the sum");
    }
    return absl::OkStatus();
  }));
}

std::string maps_of_this_process() {
  std::ifstream file("/proc/self/maps");
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(HostCollectivesTest, CommonMemoryIsUnnamedAndEndsWithItsBuffers) {
  const std::size_t files = shared_memory_files();
  expect_all_ok(fork_ranks(3, [files](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 3), store));
    check_common_memory(*group, 700'003);
    TESSERA_ASSIGN_OR_RETURN(auto buffer, group->allocate_common(5000));
    require(maps_of_this_process().find("tessera.common") != std::string::npos, "it is mapped");
    require(shared_memory_files() == files, "it has no file");
    buffer.reset();
    require(maps_of_this_process().find("tessera.common") == std::string::npos, "it is gone");
    return group->barrier("end").wait();
  }));
}

TEST(HostCollectivesTest, RanksMayMixSharedAndPrivateBuffers) {
  expect_all_ok(fork_ranks(3, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 3), store));
    constexpr std::size_t kNumel = 50'000;
    TESSERA_ASSIGN_OR_RETURN(auto shared, group->allocate(4 * kNumel));
    std::vector<float> own(kNumel);
    float* data = rank == 1 ? own.data() : reinterpret_cast<float*>(shared->data());
    std::fill_n(data, kNumel, static_cast<float>(rank + 1));
    require_ok(group->all_reduce("mixed", data, DType::kF32, data, kNumel).wait());
    for (std::size_t i = 0; i < kNumel; ++i) require(data[i] == 6.0f, "sum at " + std::to_string(i));
    return absl::OkStatus();
  }));
}

TEST(HostCollectivesTest, MoreRanksThanCoresIsNotSlow) {
  Deadline limit(std::chrono::seconds(10));
  expect_all_ok(fork_ranks(8, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 8), store));
    for (int i = 0; i < 500; ++i) TESSERA_RETURN_IF_ERROR(group->barrier("many").wait());
    return absl::OkStatus();
  }));
  EXPECT_FALSE(limit.passed());
}

/// Makes barriers until one fails.
absl::Status work_until_failure(int rank, int ranks, KeyValueStore& store, double timeout_s) {
  TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, ranks, timeout_s), store));
  TESSERA_ASSIGN_OR_RETURN(auto buffer, group->allocate(1 << 20));
  auto* data = reinterpret_cast<float*>(buffer->data());
  for (int i = 0;; ++i) {
    TESSERA_RETURN_IF_ERROR(group->all_reduce("blocks.3", data, DType::kF32, data, 1 << 18).wait());
    if (i == 5) TESSERA_RETURN_IF_ERROR(store.set("working/" + std::to_string(rank), "yes"));
  }
}

TEST(HostFailures, KilledRankIsNamedWithinTwoSecondsAndNothingIsLeft) {
  const std::size_t files = shared_memory_files();
  ForkedRanks ranks(3, [](int rank, KeyValueStore& store) { return work_until_failure(rank, 3, store, kNeverPassed); });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(told(ranks.store(), "working/" + std::to_string(rank)).ok());
  const std::string name = "rank 1 (pid " + std::to_string(ranks.pid(1)) + ")";
  Deadline soon(std::chrono::seconds(2));
  ranks.signal(1, SIGKILL);
  for (int rank : {0, 2}) {
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
    EXPECT_THAT(end.message, AllOf(HasSubstr("rank " + std::to_string(rank) + "/3 blocks.3 all_reduce #"),
                                   HasSubstr(name + " is gone, last in all_reduce 'blocks.3' of 262144 fp32")));
  }
  EXPECT_FALSE(soon.passed());
  EXPECT_EQ(ranks.wait(1).signal, SIGKILL);
  EXPECT_EQ(shared_memory_files(), files);
}

TEST(HostFailures, RankKilledWithReductionsUnderWayIsNamed) {
  ForkedRanks ranks(2, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 2), store));
    TESSERA_ASSIGN_OR_RETURN(auto buffer, group->allocate(1 << 20));
    auto* data = reinterpret_cast<float*>(buffer->data());
    const auto start = [&] { return group->all_reduce("blocks.3", data, DType::kF32, data, 1 << 18, Waits::kLater); };
    Work first = start(), second = start();
    TESSERA_RETURN_IF_ERROR(first.wait());
    if (rank == 1) {
      TESSERA_RETURN_IF_ERROR(store.set("working", "yes"));
      pause();
    }
    return second.wait();
  });
  ASSERT_TRUE(told(ranks.store(), "working").ok());
  ranks.signal(1, SIGKILL);
  const RankEnd end = ranks.wait(0);
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
  EXPECT_THAT(end.message, AllOf(HasSubstr("rank 0/2 blocks.3 all_reduce #"),
                                 HasSubstr("rank 1 (pid " + std::to_string(ranks.pid(1)) + ") is gone")));
}

TEST(HostFailures, StoppedRankIsNamedAtTheTimeLimit) {
  const double timeout_s = patient_s(1);
  ForkedRanks ranks(3, [=](int rank, KeyValueStore& store) { return work_until_failure(rank, 3, store, timeout_s); });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(told(ranks.store(), "working/" + std::to_string(rank)).ok());
  Deadline soon(std::chrono::seconds(6));
  ranks.signal(2, SIGSTOP);
  for (int rank : {0, 1}) {
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
    EXPECT_THAT(end.message, AllOf(ContainsRegex("timed out after [0-9.]+ s"), HasSubstr("rank 2 (pid ")));
  }
  EXPECT_FALSE(soon.passed());
  ranks.signal(2, SIGCONT);  // when the rank runs again, it learns that the other ranks are gone
  EXPECT_EQ(ranks.wait(2).exit_code, ExitCode::kPeerLost);
}

TEST(HostFailures, MissingRankIsNamedAtStart) {
  const double init_timeout_s = patient_s(0.3);
  ForkedRanks ranks(2, [=](int rank, KeyValueStore& store) -> absl::Status {
    Group group = world_of(rank, 3);
    group.init_timeout_s = init_timeout_s;
    return host_collectives(group, store).status();
  });
  const RankEnd end = ranks.wait(0);
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
  EXPECT_THAT(end.message, ContainsRegex("still misses rank 2 after [0-9.]+ s"));
  EXPECT_EQ(ranks.wait(1).exit_code, ExitCode::kPeerLost);
}

/// The store of a process that has ended: each question fails at once.
class EndedStore final : public KeyValueStore {
 public:
  absl::Status set(const std::string&, const std::string&) override { return gone(); }
  absl::StatusOr<std::string> get(const std::string&, std::chrono::milliseconds) override { return gone(); }
  absl::StatusOr<bool> has(const std::string&) override { return gone(); }
  absl::StatusOr<std::int64_t> add(const std::string&, std::int64_t) override { return gone(); }

 private:
  static absl::Status gone() { return make_error(ExitCode::kPeerLost, "rank 0 is gone, which serves the store"); }
};

TEST(HostFailures, EndOfTheStoreIsNoTimeLimit) {
  EndedStore store;
  const absl::Status status = host_collectives(world_of(1, 2), store).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1/2: group world[0,1]: rank 0 is gone, which serves the store"),
                                        Not(HasSubstr("init_timeout_s"))));
}

TEST(HostFailures, EndedProcessEndsTheWaitsThatNeedItsRank) {
  using std::chrono::milliseconds;
  const auto ends = fork_ranks(2, [](int rank, KeyValueStore& store) -> absl::Status {
    if (rank == 1) {
      TESSERA_RETURN_IF_ERROR(publish_process(store, rank));
      return store.set("published", "");
    }
    TESSERA_RETURN_IF_ERROR(store.get("published", milliseconds(60'000)).status());
    const absl::Status other = get_from_others(store, "never", milliseconds(500), std::array{0}).status();
    if (!absl::IsDeadlineExceeded(other)) return make_error(ExitCode::kInternal, message_of(other));
    return get_from_others(store, "never", milliseconds(60'000), std::array{1}).status();
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kPeerLost) << ends[0].message;
  EXPECT_THAT(ends[0].message, HasSubstr("the process of rank 1 has ended"));
}

TEST(HostFailures, RankThatLeftIsNamed) {
  const auto ends = fork_ranks(2, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 2), store));
    return rank == 1 ? absl::OkStatus() : group->barrier("alone").wait();
  });
  EXPECT_EQ(ends[0].exit_code, ExitCode::kPeerLost);
  EXPECT_THAT(ends[0].message, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("has left, which has made no call yet")));
}

TEST(HostFailures, TooMuchMemoryIsAnErrorOnAllRanksAndNoSignal) {
  const auto ends = fork_ranks(2, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 2), store));
    return group->allocate(std::size_t{1} << 50).status();
  });
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, ExitCode::kOsResource) << end.message;
  const auto common = fork_ranks(2, [](int rank, KeyValueStore& store) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto group, host_collectives(world_of(rank, 2), store));
    return group->allocate_common(std::size_t{1} << 50).status();
  });
  for (const auto& end : common) EXPECT_EQ(end.exit_code, ExitCode::kOsResource) << end.message;
}

}  // namespace
}  // namespace tessera
