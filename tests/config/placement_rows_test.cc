// Tests placements that are given by axes of the mesh: which placements are legal, the texts of errors, and the meaning
// of names.

#include "runtime/config/placement_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_names.h"
#include "tests/config/strategy_schema.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

const std::array<std::string, 4> kListsOfAxes = {"[]", R"(["rank"])", R"(["host"])", R"(["host", "rank"])"};

std::string placement_file(const std::string& parameters, const std::string& gradients, const std::string& optimizer,
                           const std::string& more = "") {
  return R"({"placement": {"parameters": )" + parameters + R"(, "gradients": )" + gradients + R"(, "optimizer": )" +
         optimizer + "}" + more + "}";
}

std::string error_of_file(const std::string& text) {
  const auto strategy = parse_strategy(text, "s.json");
  if (strategy.ok()) return "";
  EXPECT_EQ(exit_code_of(strategy.status()), ExitCode::kConfig);
  return message_of(strategy.status());
}

TEST(PlacementRows, TwelveOfSixtyFourCombinationsAreLegal) {
  int legal = 0;
  for (const std::string& parameters : kListsOfAxes) {
    for (const std::string& gradients : kListsOfAxes) {
      for (const std::string& optimizer : kListsOfAxes) {
        const std::string file = placement_file(parameters, gradients, optimizer);
        const std::string error = error_of_file(file);
        if (error.empty()) {
          ++legal;
        } else {
          EXPECT_THAT(error, HasSubstr("hint: ")) << file;
          EXPECT_THAT(error, HasSubstr("/placement/")) << file;
        }
        EXPECT_EQ(schema_errors(nlohmann::json::parse(file)), "") << file;
      }
    }
  }
  EXPECT_EQ(legal, 12);
}

TEST(PlacementRows, EveryNameIsALegalPlacement) {
  for (const PlacementRow& row : placement_rows()) {
    EXPECT_EQ(problem_of(row.axes), "") << name_of(row.strategy);
    Strategy named;
    named.strategy = row.strategy;
    named.optimizer.shard_over_world = row.over_world;
    EXPECT_EQ(placement_axes(named), row.axes) << name_of(row.strategy);
    EXPECT_EQ(keeps_gathered(named), row.keeps_gathered) << name_of(row.strategy);
    EXPECT_TRUE(is_placed_as(named, row.strategy)) << name_of(row.strategy);
  }
}

TEST(PlacementRows, IllegalCombinationNamesTheRule) {
  EXPECT_THAT(error_of_file(placement_file(R"(["host"])", R"(["host"])", R"(["host"])")),
              HasSubstr("gathered over \"rank\" alone"));
  EXPECT_THAT(error_of_file(placement_file(R"(["rank"])", "[]", R"(["rank"])")),
              HasSubstr("parameters are cut over [rank] and gradients over []"));
  EXPECT_THAT(error_of_file(placement_file("[]", R"(["host", "rank"])", R"(["rank"])")),
              HasSubstr("gradients are cut over [host, rank] and optimizer over [rank]"));
  EXPECT_THAT(error_of_file(R"({"placement": {"parameters": [], "optimizer": ["rank"]}})"),
              HasSubstr("lacks gradients"));
  EXPECT_THAT(error_of_file(placement_file("[]", "[]", R"(["rank"])", R"(, "strategy": "SHARD_OPTIMIZER")")),
              HasSubstr("give one or the other"));
  EXPECT_THAT(error_of_file(placement_file("[]", "[]", R"(["ranks"])")), HasSubstr("must be one of host, rank"));
  EXPECT_THAT(error_of_file(placement_file("[]", "[]", R"(["rank", "rank"])")), HasSubstr("in the list already"));
  EXPECT_THAT(error_of_file(placement_file("[]", "[]", R"("rank")")), HasSubstr("null or a list of different axes"));
}

TEST(PlacementRows, OtherKeysAreComparedWithTheAxes) {
  const std::string over_hosts = placement_file(
      "[]", "[]", R"(["host"])", R"(, "sync": {"type": "local_sgd", "every": 7}, "mesh": {"host": 2, "rank": 2})");
  EXPECT_THAT(error_of_file(over_hosts), HasSubstr("placement over host"));
  EXPECT_EQ(error_of_file(placement_file("[]", "[]", "[]", R"(, "units": {"bucket_cap_mb": 4})")), "");
  EXPECT_THAT(error_of_file(placement_file("[]", "[]", R"(["rank"])", R"(, "units": {"bucket_cap_mb": 4})")),
              HasSubstr("buckets need"));
  EXPECT_EQ(error_of_file(placement_file("[]", "[]", R"(["rank"])", R"(, "sync": {"type": "asynchronous"})")), "");
  const std::string below = R"(, "offload": {"paths": ["a"], "parameters": {"tier": "nvme"}})";
  EXPECT_EQ(error_of_file(placement_file(R"(["rank"])", R"(["rank"])", R"(["rank"])", below)), "");
  EXPECT_THAT(error_of_file(placement_file("[]", R"(["rank"])", R"(["rank"])", below)), HasSubstr("gathered"));
  EXPECT_THAT(error_of_file(placement_file(R"(["rank"])", R"(["rank"])", R"(["host", "rank"])", below)),
              HasSubstr("over replicas below memory"));
}

TEST(PlacementRows, SumsAreWholeWhereSeveralRanksHoldTheSamePart) {
  const auto whole = [](CutAxes gradients, std::int64_t hosts, std::int64_t ranks) {
    Strategy strategy;
    strategy.placement = {CutAxes{}, gradients, CutAxes{.host = true, .rank = true}};
    strategy.mesh.host = hosts;
    strategy.mesh.rank = ranks;
    return gets_whole_sums(strategy);
  };
  EXPECT_TRUE(whole({}, 2, 2));
  EXPECT_TRUE(whole({.rank = true}, 2, 2));
  EXPECT_TRUE(whole({.rank = true}, 0, 0)) << "the mesh may have several hosts";
  EXPECT_FALSE(whole({.rank = true}, 1, 4)) << "as under FULL_SHARD";
  EXPECT_TRUE(whole({.host = true}, 1, 4));
  EXPECT_FALSE(whole({.host = true}, 4, 1));
  EXPECT_FALSE(whole({.host = true, .rank = true}, 2, 2));
}

TEST(PlacementRows, MeshAxisHasOneName) {
  EXPECT_THAT(error_of_file(R"({"strategy": "NO_SHARD", "mesh": {"host": 2, "replicate": 2}})"),
              HasSubstr("another name of mesh.replicate"));
  EXPECT_THAT(error_of_file(R"({"strategy": "NO_SHARD", "mesh": {"rank": 2, "shard": 2}})"),
              HasSubstr("another name of mesh.shard"));
  EXPECT_THAT(error_of_file(R"({"mesh": {"host": 2}})"), HasSubstr("HYBRID_SHARD"));
  const auto strategy = parse_strategy(placement_file("[]", "[]", "[]", R"(, "mesh": {"host": 4, "rank": 8})"));
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_EQ(strategy->mesh.replicas(), 4);
  EXPECT_EQ(strategy->mesh.shards(), 8);
}

TEST(PlacementRows, ProgramsStrategyIsCheckedToo) {
  Strategy strategy;
  strategy.placement = {CutAxes{}, CutAxes{}, CutAxes{.host = true, .rank = true}};
  EXPECT_TRUE(check_strategy(strategy).ok()) << check_strategy(strategy);
  strategy.optimizer.shard_over_world = true;
  EXPECT_THAT(message_of(check_strategy(strategy)), HasSubstr("leave shard_over out"));
  strategy.optimizer.shard_over_world = false;
  strategy.placement.parameters = CutAxes{.host = true};
  EXPECT_THAT(message_of(check_strategy(strategy)), HasSubstr("take \"host\" out of parameters"));
}

TEST(PlacementRows, DescriptionNamesTheRowWithTheSameAxes) {
  Strategy strategy;
  EXPECT_EQ(describe_placement(strategy), "parameters [rank], gradients [rank], optimizer [rank]");
  EXPECT_EQ(name_of_placement(strategy), "FULL_SHARD");
  strategy.strategy = ShardingStrategy::kShardGradOp;
  EXPECT_EQ(describe_placement(strategy),
            "parameters [rank] but gathered from forward to backward, gradients [rank], optimizer [rank]");
  strategy.strategy = ShardingStrategy::kFullShard;
  strategy.placement = {CutAxes{.rank = true}, CutAxes{.rank = true}, CutAxes{.rank = true}};
  EXPECT_EQ(describe_placement(strategy),
            "parameters [rank], gradients [rank], optimizer [rank] (as FULL_SHARD or HYBRID_SHARD)");
  EXPECT_EQ(name_of_placement(strategy), "placement by axes");
  strategy.placement.optimizer = CutAxes{.host = true, .rank = true};
  EXPECT_EQ(describe_placement(strategy), "parameters [rank], gradients [rank], optimizer [host, rank]");
}

}  // namespace
}  // namespace tessera
