// Tests reductions that a rank starts and waits for later (asynchronous reduce-scatters).

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
constexpr std::size_t kNumel = 3000;

/// Runs `body` on each rank, and returns the statuses of all ranks.
std::vector<absl::Status> statuses(int ranks, const std::function<absl::Status(int rank, Collectives&)>& body) {
  std::vector<absl::Status> results(ranks);
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    results[mesh.rank()] = body(mesh.rank(), *axes->reduce);
  });
  return results;
}

/// A rank's buffers for `count` reduce-scatters.
struct Sums {
  Sums(Collectives& group, std::size_t count)
      : input(count, std::vector<float>(kNumel * group.size(), static_cast<float>(group.rank() + 1))),
        output(count, std::vector<float>(kNumel)) {}
  Work start(Collectives& group, std::size_t i, std::size_t numel = kNumel) {
    return group.reduce_scatter("unit " + std::to_string(i), input[i].data(), DType::kF32, output[i].data(), numel,
                                Waits::kLater);
  }
  std::vector<std::vector<float>> input, output;
};

TEST(StartedReductions, RankStartsReductionsWithoutItsPeers) {
  std::atomic<bool> started = false;
  const auto results = statuses(2, [&](int rank, Collectives& group) -> absl::Status {
    constexpr std::size_t kCount = Collectives::kMostUnderWay;
    Sums sums(group, kCount);
    while (rank == 1 && !started) std::this_thread::yield();
    std::vector<Work> works;
    for (std::size_t i = 0; i < kCount; ++i) works.push_back(sums.start(group, i));
    started = true;
    for (std::size_t i = 0; i < kCount; ++i) {
      TESSERA_RETURN_IF_ERROR(works[i].wait());
      for (float value : sums.output[i]) require(value == 3, "1 + 2");
    }
    return absl::OkStatus();
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

TEST(StartedReductions, RankWithItsShareDoneKeepsNobodyWaiting) {
  std::atomic<bool> waited = false;
  const auto results = statuses(2, [&](int rank, Collectives& group) -> absl::Status {
    Sums sums(group, 2);
    Work first = sums.start(group, 0);
    TESSERA_RETURN_IF_ERROR(first.advance());
    while (rank == 1 && !waited) std::this_thread::yield();  // this rank is busy with something else
    TESSERA_RETURN_IF_ERROR(first.wait());
    waited = true;
    return sums.start(group, 1).wait();
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

TEST(StartedReductions, ManyInARowAreExactWithRanksThatDelayInTurn) {
  for (const int ranks : {2, 3, 8}) {
    const auto results = statuses(ranks, [&](int rank, Collectives& group) -> absl::Status {
      constexpr std::size_t kUnderWay = 7, kCalls = 300;
      Sums sums(group, kUnderWay);
      std::vector<Work> works(kUnderWay);
      for (std::size_t i = 0; i < kCalls + kUnderWay; ++i) {
        const std::size_t place = i % kUnderWay;
        if (i >= kUnderWay) {
          TESSERA_RETURN_IF_ERROR(works[place].wait());
          const auto expected = static_cast<float>(ranks * (ranks + 1) / 2 + (i - kUnderWay) * ranks);
          require(sums.output[place].front() == expected && sums.output[place].back() == expected, "sum of call");
        }
        if (i >= kCalls) continue;
        std::fill(sums.input[place].begin(), sums.input[place].end(), static_cast<float>(rank + 1 + i));
        works[place] = sums.start(group, place);
        if (i >= 3) TESSERA_RETURN_IF_ERROR(works[(i - 3) % kUnderWay].advance());
        if (static_cast<int>(i / 10) % ranks == rank) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      return absl::OkStatus();
    });
    for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
  }
}

TEST(StartedReductions, RanksThatDisagreeAllFailWithBothCalls) {
  const auto results = statuses(3, [](int rank, Collectives& group) {
    Sums sums(group, 2);
    Work first = sums.start(group, 0), second = sums.start(group, 1, rank == 2 ? kNumel - 1 : kNumel);
    const absl::Status status = first.wait();
    return status.ok() ? second.wait() : status;
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(exit_code_of(results[rank]), ExitCode::kInternal);
    EXPECT_THAT(message_of(results[rank]), AllOf(HasSubstr("unit 1 reduce_scatter #2"),
                                                 HasSubstr("rank 0 calls reduce_scatter 'unit 1' of 3000 fp32"),
                                                 HasSubstr("rank 2 calls reduce_scatter 'unit 1' of 2999 fp32")));
  }
}

TEST(StartedReductions, MoreThan16UnderWayAreRefused) {
  const auto results = statuses(1 + 1, [](int, Collectives& group) {
    Sums sums(group, Collectives::kMostUnderWay + 1);
    std::vector<Work> works;
    for (int i = 0; i <= Collectives::kMostUnderWay; ++i) works.push_back(sums.start(group, i));
    return works.back().wait();
  });
  for (const absl::Status& result : results) {
    EXPECT_EQ(exit_code_of(result), ExitCode::kInternal);
    EXPECT_THAT(message_of(result),
                ::testing::AnyOf(HasSubstr("at most 16 reductions may be under way"), HasSubstr("gave up")));
  }
}

// The exception destroys the buffers while the peer may be about to read them (ASan and TSan watch this). The peer must
// get the exception's text.
TEST(StartedReductions, PeersGetTheTextOfAnExceptionWhileUnderWay) {
  for (int round = 0; round < 20; ++round) {
    std::string told;
    const auto body = [&](const Mesh& mesh) {
      auto axes = groups_of(mesh).axes(1, 2);
      require_ok(axes.status());
      Sums sums(*axes->reduce, 4);
      std::vector<Work> works;
      for (std::size_t i = 0; i < 4; ++i) works.push_back(sums.start(*axes->reduce, i));
      if (mesh.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
        throw std::runtime_error("the model of rank 1 is broken");
      }
      absl::Status status;
      for (Work& work : works)
        if (status.ok()) status = work.wait();
      told = message_of(status);
      throw std::runtime_error(told);
    };
    EXPECT_THROW(run_ranks({.ranks = 2}, body), std::runtime_error);
    EXPECT_THAT(told, HasSubstr("rank 1 gave up: the model of rank 1 is broken"));
  }
}

TEST(StartedReductions, DroppedReductionEndsTheGroup) {
  const auto results = statuses(2, [](int rank, Collectives& group) {
    Sums sums(group, 1);
    Work work = sums.start(group, 0);
    if (rank == 0) return work.wait();
    work = Work();
    return group.barrier("next").wait();
  });
  EXPECT_THAT(message_of(results[0]), HasSubstr("rank 1 gave up: rank 1/2 unit 0 reduce_scatter #1"));
  EXPECT_THAT(message_of(results[1]), HasSubstr("a reduction was started and not waited for"));
}

}  // namespace
}  // namespace tessera
