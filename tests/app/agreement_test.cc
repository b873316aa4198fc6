// Tests that ranks compare what they have prepared before they train, and that the error names their differences.

#include "workshop/app/train/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "engine/job/same_start.h"
#include "runtime/base/status.h"
#include "runtime/config/json_differences.h"

namespace tessera::app {
namespace agreement_test {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

/// Lets ranks on threads agree. The prepared values of rank r are prepared(r). Returns each rank's status.
std::vector<absl::Status> agree_on(int ranks, const std::function<absl::StatusOr<json>(int)>& prepared) {
  const auto store = memory_store();
  std::vector<absl::Status> ends(ranks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { ends[rank] = agree(prepared(rank), {rank, ranks, 10.0}, *store); });
  threads.clear();
  return ends;
}

json strategy_with_lr(double lr) {
  return {{"strategy", {{"optimizer", {{"lr", lr}}}, {"units", json::array({"Block"})}}}};
}

TEST(Agreement, EqualStrategiesOnAllRanksPass) {
  for (int ranks : {1, 2, 5})
    for (const absl::Status& end : agree_on(ranks, [](int) { return strategy_with_lr(0.1); })) EXPECT_TRUE(end.ok());
}

TEST(Agreement, NamesTheRankAndTheKeyThatDiffer) {
  for (const absl::Status& end : agree_on(4, [](int rank) { return strategy_with_lr(rank == 2 ? 0.3 : 0.1); })) {
    EXPECT_EQ(exit_code_of(end), ExitCode::kConfig);
    EXPECT_THAT(message_of(end), HasSubstr("rank 2/4: /strategy/optimizer/lr: 0.3, rank 0 has 0.1"));
    EXPECT_THAT(message_of(end), Not(HasSubstr("rank 1/4")));
  }
}

TEST(Agreement, NamesTheVersionThatDiffers) {
  for (const char* library : {"tessera", "libtorch"}) {
    const auto build_of = [&](int rank) {
      json build = this_build();
      EXPECT_NE(build.at(library), "") << library;
      if (rank == 1) build[library] = "0.0.1";
      return json{{"build", build}};
    };
    for (const absl::Status& end : agree_on(2, build_of)) {
      EXPECT_EQ(exit_code_of(end), ExitCode::kConfig);
      EXPECT_THAT(message_of(end), HasSubstr(std::string("rank 1/2: /build/") + library + ": \"0.0.1\", rank 0 has"));
    }
  }
}

TEST(Agreement, FailedRankEndsAllOthersWithoutAWait) {
  for (int failing : {0, 1}) {
    const auto ends = agree_on(3, [&](int rank) -> absl::StatusOr<json> {
      if (rank == failing) return make_error(ExitCode::kNoInput, "no such file: corpus.bin");
      return strategy_with_lr(0.1);
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(exit_code_of(ends[rank]), rank == failing ? ExitCode::kNoInput : ExitCode::kPeerLost);
      EXPECT_THAT(message_of(ends[rank]), HasSubstr("corpus.bin"));
      const std::string named = "rank " + std::to_string(failing) + "/3";
      EXPECT_EQ(message_of(ends[rank]).find(named) != std::string::npos, rank != failing);
    }
  }
}

TEST(Agreement, DifferencesAreCutAtFive) {
  json mine, theirs;
  for (int i = 0; i < 9; ++i) mine["k" + std::to_string(i)] = i;
  theirs = mine;
  EXPECT_TRUE(differences(mine, theirs).empty());
  for (auto& value : theirs) value = 100;
  const auto found = differences(mine, theirs);
  ASSERT_EQ(found.size(), 6u);
  EXPECT_EQ(found.back(), "and 4 more");
  EXPECT_THAT(differences(json{{"a", 1}}, json{{"b", 1}}),
              ::testing::ElementsAre("/a: 1, rank 0 has nothing", "/b: nothing, rank 0 has 1"));
}

}  // namespace agreement_test
}  // namespace tessera::app
