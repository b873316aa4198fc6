// Tests rules that need norms of parameters, matrices or whole tensors with parameter servers: each group of such a
// rule has one server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "engine/asynchronous/servers/parameter_server.h"
#include "engine/asynchronous/servers/served_cut.h"
#include "engine/asynchronous/servers/served_definition.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/engine/asynchronous/whole_rules_oracle.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace whole_servers_test {

using servers_test::kRanks;
using servers_test::kServers;
using servers_test::Ran;
using servers_test::run;
using servers_test::served;
using servers_test::Servers;
using ::testing::HasSubstr;

/// Returns the options with a rule that servers support.
std::vector<OrderOption> options() {
  std::vector<OrderOption> list = whole_order_options();
  std::erase_if(list, [](const OrderOption& each) { return each.own_rules.matrices != nullptr; });
  return list;
}

/// Returns the strategies of the options with these names, each changed by `adjust`.
std::vector<Strategy> strategies_of(const std::vector<std::string>& names, const Adjust& adjust = nullptr) {
  std::vector<Strategy> list;
  for (const OrderOption& option : options()) {
    if (std::ranges::find(names, option.name) == names.end()) continue;
    list.push_back(served(option.adjust));
    if (adjust) adjust(list.back());
  }
  EXPECT_EQ(list.size(), names.size());
  return list;
}

void in_rounds(Strategy& s) { s.sync.asynchronous.max_staleness = 0; }

TEST(WholeServers, RecordedAndPlayedRunsEqualPlainLibTorchThatPlaysTheirOrder) {
  at::set_num_threads(1);
  const Servers servers;
  for (const OrderOption& option : options()) {
    SCOPED_TRACE(option.name);
    const TestFolder folder;
    Strategy strategy = served(option.adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran got = run(strategy, 4, kRanks, option);
    OrderOracle oracle(strategy, kRanks, option, kServers);
    oracle.play(read_lines(folder / "order.jsonl"));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));

    const auto order = shuffled(read_lines(folder / "order.jsonl"), kRanks, /*seed=*/7);
    write_lines(folder / "random.jsonl", kRanks, order);
    strategy.sync.asynchronous.record_order.clear();
    strategy.sync.asynchronous.play_order = folder / "random.jsonl";
    const Ran again = run(strategy, 4, kRanks, option);
    OrderOracle other(strategy, kRanks, option, kServers);
    other.play(counted(order));
    EXPECT_EQ(again.losses, other.losses());
    EXPECT_TRUE(all_same_bits(again.values, other.values()));
  }
}

TEST(WholeServers, RoundsHaveTheBitsOfShardsThatRanksOwn) {
  at::set_num_threads(1);
  const Servers servers(3);
  for (Strategy& strategy : strategies_of({"lamb", "muon", "adafactor"}, in_rounds)) {
    SCOPED_TRACE(name_of(strategy.optimizer.type));
    const Ran by_servers = run(strategy, 4);
    strategy.sync.asynchronous.owners = ShardOwners::kRanks;
    const Ran by_ranks = run(strategy, 4);
    EXPECT_EQ(by_servers.losses, by_ranks.losses);
    EXPECT_TRUE(all_same_bits(by_servers.values, by_ranks.values));
  }
}

TEST(WholeServers, ReplicaOfAllRanksHasTheBitsOfStepsThatAllRanksMakeTogether) {
  at::set_num_threads(1);
  for (const Strategy& together : strategies_of({"lars, clipped by the norm", "muon", "adafactor"})) {
    SCOPED_TRACE(name_of(together.optimizer.type));
    const Servers servers;
    Strategy strategy = together;
    strategy.sync.asynchronous.replica_ranks = kRanks;
    const Ran got = run(strategy, 4);
    Strategy plain = together;
    plain.sync = {};
    plain.gradient_sync = GradientSync::kLastMicrobatch;
    const Ran wanted = run(plain, 4);
    EXPECT_EQ(got.losses, wanted.losses);
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
  }
}

TEST(WholeServers, MemoryOfARankEqualsThePlan) {
  at::set_num_threads(1);
  const Servers servers;
  for (const Strategy& strategy : strategies_of({"lamb", "muon", "adafactor"})) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      const StepResult result = session.train(0);
      EXPECT_EQ(result.planned, result.allocated);
      EXPECT_EQ(plan_memory(*session.model, strategy, mesh.topology()).use, result.planned);
      barrier(mesh);
    });
  }
}

TEST(WholeServers, CheckpointGoesOnWithShardsThatRanksOwn) {
  at::set_num_threads(1);
  const Servers servers;
  for (const Strategy& strategy : strategies_of({"lamb", "muon", "adafactor"}, in_rounds)) {
    SCOPED_TRACE(name_of(strategy.optimizer.type));
    const TestFolder folder;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const auto go_on = [&](Session& session) {
        for (std::size_t i = 3; i < 5; ++i) session.train(i);
        barrier(mesh);
        Values values = session.values();
        barrier(mesh);
        return values;
      };
      Values wanted;
      {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
        wanted = go_on(session);
      }
      for (const ShardOwners owners : {ShardOwners::kServers, ShardOwners::kRanks}) {
        Strategy other = strategy;
        other.sync.asynchronous.owners = owners;
        Session session(mesh, other);
        load_checkpoint(session.engine, folder.path());
        EXPECT_TRUE(all_same_bits(go_on(session), wanted));
      }
    });
  }
}

TEST(WholeServers, RankAloneKeepsItsBitsWhenItsServerIsKilledAndComesBack) {
  for (const Strategy& strategy : strategies_of({"lamb", "muon", "adafactor"})) {
    SCOPED_TRACE(name_of(strategy.optimizer.type));
    const TestFolder folder;
    const servers_test::NamedServer named;
    const int port = free_port();
    const KeepOptions keep{folder.path(), /*lose=*/0};
    servers_test::ServerProcess first(named.address, keep), second(named.address, keep);
    first.start();
    ForkedRanks processes(1, [&](int rank, KeyValueStore& store) -> absl::Status {
      join_as(rank, 1, port);
      at::set_num_threads(1);
      const Mesh mesh = init(strategy);
      std::size_t steps = 0;
      Values got;
      {
        Session session(mesh, strategy);
        session.train(steps++);
        TESSERA_RETURN_IF_ERROR(store.set("trains", ""));
        for (bool is_over = false; !is_over; session.train(steps++)) {
          TESSERA_ASSIGN_OR_RETURN(is_over, store.has("is back"));
        }
        for (int i = 0; i < 2; ++i) session.train(steps++);
        got = session.values();
      }
      require(all_same_bits(got, trained(mesh, strategy, steps)), "the bits of an unbroken run");
      return absl::OkStatus();
    });
    EXPECT_TRUE(told(processes.store(), "trains").ok());
    first.kill();
    second.start();
    EXPECT_TRUE(processes.store().set("is back", "").ok());
    expect_ok(processes, 0, 1);
  }
}

TEST(WholeServers, ProgramsRulesAreRefusedByName) {
  for (const std::string type : {"own", "own_matrix"}) {
    const std::string text = R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "owners": "servers"},
                                 "optimizer": {"type": ")" +
                             type + R"("}})";
    EXPECT_THAT(error_of([&] { Strategy::from_json(text); }), HasSubstr("a server has none of the program's code"));
  }
}

TEST(ServedCut, EachElementHasOneServerAndOneRankOfAReplica) {
  const std::vector<ServedCut::Group> groups = {{640, true}, {65536, false}, {64, true}, {0, true}, {1920, true}};
  for (const int servers : {1, 2, 3}) {
    for (const int pieces : {1, 2}) {
      const ServedCut cut(groups, servers, pieces);
      for (std::size_t i = 0; i < groups.size(); ++i) {
        std::int64_t numel = 0, shards = 0;
        for (int server = 0; server < servers; ++server) {
          for (int piece = 0; piece < pieces; ++piece) {
            const Extent shard = cut.shard(i, server, piece);
            numel += shard.numel;
            shards += shard.numel > 0 ? 1 : 0;
          }
        }
        EXPECT_EQ(numel, groups[i].numel);
        if (groups[i].is_whole) {
          EXPECT_LE(shards, 1);
        } else {
          EXPECT_EQ(shards, servers + pieces - std::gcd(servers, pieces)) << "the cuts of both are even";
        }
      }
    }
  }
}

TEST(ServedCut, WholeGroupsAreDealtEvenly) {
  std::vector<ServedCut::Group> groups;
  for (std::int64_t i = 1; i <= 12; ++i) groups.push_back({64 * i, true});
  const ServedCut cut(groups, /*servers=*/3, /*pieces=*/1);
  std::array<std::int64_t, 3> loads{};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (int server = 0; server < 3; ++server) loads[static_cast<std::size_t>(server)] += cut.shard(i, server, 0).numel;
  }
  EXPECT_LE(std::ranges::max(loads) - std::ranges::min(loads), 64 * 2);
}

/// Returns a definition with one matrix of 8 x 16 elements.
nlohmann::json definition_with(const std::string& type, const std::function<void(nlohmann::json&)>& change) {
  Strategy strategy = served();
  strategy.optimizer.type = type == "muon" ? OptimizerType::kMuon : OptimizerType::kAdamW;
  const auto list = [](std::vector<std::vector<std::int64_t>> numbers) { return nlohmann::json(std::move(numbers)); };
  nlohmann::json group = {{"unit", "a"},
                          {"unit_index", 0},
                          {"group", 0},
                          {"numels", std::vector<std::int64_t>{128}},
                          {"parts", 1},
                          {"options", std::vector<std::int64_t>{-1}},
                          {"matrices", list({{8, 16}})},
                          {"sizes", list({{8, 16}})},
                          {"strides", list({{16, 1}})}};
  change(group);
  return {{"ranks", 1},
          {"server", 0},
          {"servers", 1},
          {"timeout_s", 10},
          {"strategy", strategy.to_json()},
          {"groups", nlohmann::json::array({group})}};
}

TEST(ServedDefinition, ShapesThatDoNotFitTheirTensorAreRefused) {
  using Numbers = std::vector<std::vector<std::int64_t>>;
  const auto is_read = [](const std::string& type, const std::function<void(nlohmann::json&)>& change) {
    try {
      return read_definition(definition_with(type, change).dump()).ok();
    } catch (const std::exception&) {
      return false;
    }
  };
  EXPECT_TRUE(is_read("muon", [](nlohmann::json&) {}));
  const std::pair<const char*, Numbers> bad[] = {
      {"matrices", {{8, 17}}},        {"matrices", {{-8, -16}}}, {"matrices", {}},
      {"matrices", {{1LL << 62, 8}}}, {"sizes", {{8, 15}}},      {"sizes", {{128}}},
      {"sizes", {{-8, -16}}},         {"strides", {{17, 1}}},    {"strides", {{-16, 1}}},
      {"strides", {{16, 1LL << 62}}}, {"strides", {{16}}},       {"strides", {}}};
  for (const auto& [key, numbers] : bad) {
    EXPECT_FALSE(is_read("muon", [&](nlohmann::json& group) { group[key] = numbers; }))
        << key << " " << nlohmann::json(numbers).dump();
  }
  EXPECT_FALSE(is_read("adamw", [](nlohmann::json&) {})) << "its rule has no matrices";
}

}  // namespace whole_servers_test
}  // namespace tessera::testing
