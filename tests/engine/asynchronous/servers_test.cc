// Tests "sync": {"type": "asynchronous", "owners": "servers"}: parameter servers own the shards, and ranks talk only
// to servers. A server that keeps its shards on disk can be started again.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "engine/asynchronous/servers/parameter_server.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tests/engine/asynchronous/counted_shard.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/limits/patience.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace servers_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Servers, RecordedAndPlayedRunsEqualPlainLibTorchThatPlaysTheirOrder) {
  at::set_num_threads(1);
  const Servers servers;
  for (const OrderOption& option : order_options()) {
    SCOPED_TRACE(option.name);
    const TestFolder folder;
    Strategy strategy = served(option.adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran got = run(strategy, 4, kRanks, option);
    OrderOracle oracle(strategy, kRanks, option, kServers);
    oracle.play(read_lines(folder / "order.jsonl"));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));

    strategy.sync.asynchronous.play_order = folder / "order.jsonl";
    strategy.sync.asynchronous.record_order = folder / "again.jsonl";
    const Ran again = run(strategy, 4, kRanks, option);
    EXPECT_EQ(got.losses, again.losses);
    EXPECT_TRUE(all_same_bits(got.values, again.values));
  }
}

TEST(Servers, RandomOrdersEqualPlainLibTorch) {
  at::set_num_threads(1);
  const Servers servers;
  const TestFolder folder;
  std::int64_t oldest = 0;
  std::vector<std::string> recorded(order_options().size());  // [option]: its record, made when it is first used
  const std::uint64_t seeds = tests_are_long() ? 200 : 15;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    // The seeds of the short test, too, reach from the first options to the last ones.
    const std::size_t number = (seed * 7) % order_options().size();
    const OrderOption& option = order_options()[number];
    SCOPED_TRACE(std::string(option.name) + ", seed " + std::to_string(seed));
    Strategy strategy = served(option.adjust);
    if (recorded[number].empty()) {
      recorded[number] = folder / std::to_string(number);
      strategy.sync.asynchronous.record_order = recorded[number];
      run(strategy, 4, kRanks, option);
      strategy.sync.asynchronous.record_order.clear();
    }
    const auto order = shuffled(read_lines(recorded[number]), kRanks, seed);
    write_lines(folder / "random.jsonl", kRanks, order);
    strategy.sync.asynchronous.play_order = folder / "random.jsonl";
    const Ran got = run(strategy, 4, kRanks, option);
    OrderOracle oracle(strategy, kRanks, option, kServers);
    oracle.play(counted(order));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
    oldest = std::max(oldest, got.oldest);
  }
  EXPECT_GT(oldest, 0) << "some gradient was old";
}

TEST(Servers, RoundsWithoutStalenessHaveTheBitsOfShardsThatRanksOwn) {
  const Servers servers(3);
  Strategy strategy = served([](Strategy& s) { s.sync.asynchronous.max_staleness = 0; });
  const Ran by_servers = run(strategy, 5);
  strategy.sync.asynchronous.owners = ShardOwners::kRanks;
  const Ran by_ranks = run(strategy, 5);
  EXPECT_EQ(by_servers.losses, by_ranks.losses);
  EXPECT_TRUE(all_same_bits(by_servers.values, by_ranks.values));
}

Strategy in_replicas(std::int64_t ranks, const Adjust& adjust = nullptr) {
  Strategy strategy = served(adjust);
  strategy.sync.asynchronous.replica_ranks = ranks;
  return strategy;
}

TEST(Servers, ReplicaOfAllRanksHasTheBitsOfStepsThatAllRanksMakeTogether) {
  const Adjust cases[] = {nullptr, [](Strategy& s) { sgd(s), s.gradient_clipping = 0.05; },
                          [](Strategy& s) { s.gradient_accumulation = 2; }};
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const Servers servers;
    const Strategy strategy = in_replicas(kRanks, cases[i]);
    const Ran got = run(strategy, 5);
    Strategy together = strategy;
    together.sync = {};
    together.gradient_sync = GradientSync::kLastMicrobatch;
    const Ran wanted = run(together, 5);
    EXPECT_EQ(got.losses, wanted.losses);
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
    EXPECT_EQ(got.oldest, 0) << "nobody else pushes";
  }
}

TEST(Servers, ReplicasOfTwoRanksStepTogetherAndApartFromOthers) {
  const Servers servers(3);
  const Strategy strategy = in_replicas(2, [](Strategy& s) {
    sgd(s);
    s.sync.asynchronous.max_staleness = 0;
    s.sync.asynchronous.delay_compensation.lambda = 0.5;
  });
  const Ran got = run(strategy, 5, /*ranks=*/4);
  EXPECT_EQ(got.losses[0], got.losses[1]) << "the loss is the replica's";
  EXPECT_EQ(got.losses[2], got.losses[3]);
  EXPECT_NE(got.losses[0], got.losses[2]);
  EXPECT_EQ(got.oldest, 1) << "one push of the other replica, to each shard, in each round";
  const Ran again = run(strategy, 5, /*ranks=*/4);
  EXPECT_EQ(again.losses, got.losses);
  EXPECT_TRUE(all_same_bits(again.values, got.values)) << "rounds have the same bits each time";
}

TEST(Servers, CheckpointOfReplicasGoesOnWithRanksOfTheirOwn) {
  const Servers servers;
  const TestFolder folder;
  const Values wanted = of_rank_zero({.ranks = 4}, [&](const Mesh& mesh) {
    Session session(mesh, in_replicas(2));
    for (std::size_t i = 0; i < 3; ++i) session.train(i);
    save_checkpoint(session.engine, folder.path());
    Values values = session.values();
    barrier(mesh);
    return values;
  });
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, served());
    load_checkpoint(session.engine, folder.path());
    EXPECT_TRUE(all_same_bits(session.values(), wanted));
    barrier(mesh);
    session.train(3);
    barrier(mesh);
  });
}

TEST(Servers, RanksThatMakeNoWholeReplicasAreRefused) {
  const Servers servers(1);
  EXPECT_THAT(error_of([] { run(in_replicas(2), 1); }), HasSubstr("3 ranks do not make replicas of 2"));
  const auto error_with = [](const std::string& keys) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "replica_ranks": 2)" +
                          keys + "}}");
    });
  };
  EXPECT_EQ(error_with(R"(, "owners": "servers")"), "");
  EXPECT_THAT(error_with(""), HasSubstr("sync.owners servers"));
  EXPECT_THAT(error_with(R"(, "owners": "servers", "elastic": true)"), HasSubstr("each worker is a job of one rank"));
  EXPECT_THAT(error_with(R"(, "owners": "servers", "record_order": "a")"),
              HasSubstr("an order is one of replicas of one rank"));
}

// If a rank made no pull, the other ranks of its replica would wait for it.
TEST(Servers, RankOfAReplicaHasABatchInEachStep) {
  const Servers servers(1);
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, in_replicas(2));
    EXPECT_THAT(usage_error_of([&] { session.engine.backward_nothing(); }), HasSubstr("sync.replica_ranks"));
    session.train(0);
    barrier(mesh);
  });
}

TEST(Servers, ShardsInAFileHaveTheBitsOfThoseInMemory) {
  const TestFolder folder;
  const Strategy strategy = served([](Strategy& s) { s.sync.asynchronous.max_staleness = 0; });
  Ran in_memory;
  {
    const Servers servers;
    in_memory = run(strategy, 4);
  }
  {
    const Servers servers(kServers, folder.path());
    const Ran in_file = run(strategy, 4);
    EXPECT_EQ(in_file.losses, in_memory.losses);
    EXPECT_TRUE(all_same_bits(in_file.values, in_memory.values));
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the file has no name";
  }
  EXPECT_THAT(error_of([&] { const Servers servers(1, folder / "none"); }), HasSubstr("No such file or directory"));
}

TEST(Servers, MemoryOfARankEqualsThePlan) {
  const Servers servers;
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    Session session(mesh, served());
    const StepResult result = session.train(0);
    EXPECT_EQ(result.planned, result.allocated);
    Topology topology = mesh.topology();
    EXPECT_EQ(plan_memory(*session.model, served(), topology).use, result.planned);
    topology.put_on_hosts(std::vector<int>(kRanks, 1));
    EXPECT_EQ(plan_memory(*session.model, served(), topology).use, result.planned) << "on hosts of their own";
    barrier(mesh);
  });
}

TEST(Servers, CheckpointResumesWithTheSameBits) {
  const Servers servers;
  const TestFolder folder;
  const Strategy strategy = served([](Strategy& s) { s.sync.asynchronous.max_staleness = 0; });
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Values wanted;
    {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      save_checkpoint(session.engine, folder.path());
      for (std::size_t i = 3; i < 6; ++i) session.train(i);
      barrier(mesh);
      wanted = session.values();
      barrier(mesh);
    }
    Session session(mesh, strategy);
    load_checkpoint(session.engine, folder.path());
    for (std::size_t i = 3; i < 6; ++i) session.train(i);
    barrier(mesh);
    EXPECT_TRUE(all_same_bits(session.values(), wanted));
    barrier(mesh);
  });
}

TEST(Servers, WriteUnderAGuardReachesAllRanks) {
  const Servers servers;
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    Session session(mesh, served(sgd));
    session.train(0);
    barrier(mesh);
    {
      const Gathered guard(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_grad;
      for (auto& parameter : session.model->parameters()) parameter.fill_(0.25);
    }
    for (const auto& [name, value] : session.values()) EXPECT_TRUE((value == 0.25).all().item<bool>()) << name;
    barrier(mesh);
    session.train(1);
  });
}

TEST(Servers, KilledRankOnAnotherHostStopsNobody) {
  for (const Adjust& adjust : {Adjust(sgd), Adjust([](Strategy& s) { s.sync.asynchronous.max_staleness = 1; })}) {
    const NamedServer named;
    const int port = free_port();
    ForkedRanks ranks(kRanks, [&](int rank, KeyValueStore& store) -> absl::Status {
      join_as(rank, kRanks, port, /*hosts=*/kRanks);
      at::set_num_threads(1);
      const Strategy strategy = served(adjust);
      const Mesh mesh = init(strategy);
      {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 20; ++i) {
          if (rank == 2 && i == 5) ::raise(SIGKILL);
          session.train(i);
        }
        require(session.engine.steps_applied() == 20, "all steps are this rank's own");
      }
      // Rank 0 serves the store of the job, so it ends last.
      if (rank == 1) return store.set("rank 1 has ended", "");
      return told(store, "rank 1 has ended").status();
    });
    const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));  // ranks wait for this server
    EXPECT_EQ(ranks.wait(2).signal, SIGKILL);
    expect_ok(ranks, 0, 2);
  }
}

// Rank 0 serves the store of the job. Ranks that train need no store. A save needs all ranks, so it ends with an error
// that names rank 0.
TEST(Servers, KilledRankZeroStopsNobodyAndIsNamedByThoseWhoMeet) {
  for (const int hosts : {1, kRanks}) {
    SCOPED_TRACE(hosts);
    const TestFolder folder;
    const NamedServer named;
    const int port = free_port();
    ForkedRanks ranks(kRanks, [&](int rank, KeyValueStore& store) -> absl::Status {
      join_as(rank, kRanks, port, hosts);
      at::set_num_threads(1);
      const Strategy strategy = served([](Strategy& s) { sgd(s), s.sync.asynchronous.max_staleness = 1; });
      const Mesh mesh = init(strategy);
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 20; ++i) {
        if (rank == 0 && i == 5) ::raise(SIGKILL);
        session.train(i);
      }
      require(session.engine.steps_applied() == 20, "all steps are this rank's own");
      const auto meet_in_store = [&](const std::string& what) -> absl::Status {
        TESSERA_RETURN_IF_ERROR(store.set(what + std::to_string(rank), ""));
        for (int other = 1; other < kRanks; ++other)
          TESSERA_RETURN_IF_ERROR(told(store, what + std::to_string(other)).status());
        return absl::OkStatus();
      };
      TESSERA_RETURN_IF_ERROR(meet_in_store("trained "));
      const std::string error = error_of([&] { save_checkpoint(session.engine, folder.path()); });
      TESSERA_RETURN_IF_ERROR(meet_in_store("ended "));
      return make_error(ExitCode::kPeerLost, error);
    });
    const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));  // ranks wait for this server
    EXPECT_EQ(ranks.wait(0).signal, SIGKILL);
    for (int rank = 1; rank < kRanks; ++rank) {
      const RankEnd end = ranks.wait(rank);
      EXPECT_EQ(end.signal, 0);
      EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
      EXPECT_THAT(end.message, HasSubstr("rank 0")) << "a save ends, since it needs all ranks";
    }
  }
}

// A replica is made of the two ranks of a host, or of ranks of two hosts that Gloo joins.
TEST(Servers, KilledRankEndsItsReplicaAndOtherReplicasTrainOn) {
  for (const int hosts : {2, 4}) {
    SCOPED_TRACE(hosts);
    const NamedServer named;
    const int port = free_port();
    ForkedRanks ranks(4, [&](int rank, KeyValueStore& store) -> absl::Status {
      join_as(rank, 4, port, hosts);
      at::set_num_threads(1);
      const Strategy strategy = in_replicas(2, sgd);
      const Mesh mesh = init(strategy);
      try {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 20; ++i) {
          if (rank == 3 && i == 5) ::raise(SIGKILL);
          session.train(i);
        }
        require(session.engine.steps_applied() == 20, "all steps are those of this replica");
      } catch (const Error& error) {
        return make_error(error.exit_code(), error.message());
      } catch (const std::exception& error) {  // if a pull fails, the operator throws another error
        const absl::Status told = groups_of(mesh).status();
        return told.ok() ? make_error(ExitCode::kInternal, error.what()) : told;
      }
      // Rank 0 serves the store of the job, so it ends last.
      if (rank == 1) return store.set("rank 1 has ended", "");
      return told(store, "rank 1 has ended").status();
    });
    const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));  // ranks wait for this server
    EXPECT_EQ(ranks.wait(3).signal, SIGKILL);
    const RankEnd neighbour = ranks.wait(2);
    EXPECT_EQ(neighbour.signal, 0);
    EXPECT_EQ(neighbour.exit_code, ExitCode::kPeerLost) << neighbour.message;
    expect_ok(ranks, 0, 2);
  }
}

TEST(Servers, StoppedRankHoldsNobodyUp) {
  const NamedServer named;
  const int port = free_port();
  ForkedRanks ranks(kRanks, [&](int rank, KeyValueStore& store) -> absl::Status {
    join_as(rank, kRanks, port);
    at::set_num_threads(1);
    const Strategy strategy = served(sgd);
    const Mesh mesh = init(strategy);
    Session session(mesh, strategy);
    for (std::size_t i = 0; i < 20; ++i) {
      if (rank == 2 && i == 5) ::raise(SIGSTOP);
      session.train(i);
    }
    TESSERA_RETURN_IF_ERROR(store.set("done " + std::to_string(rank), ""));
    barrier(mesh);
    return absl::OkStatus();
  });
  const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));
  EXPECT_TRUE(told(ranks.store(), "done 0").ok());
  EXPECT_TRUE(told(ranks.store(), "done 1").ok());
  EXPECT_FALSE(value_or_throw(ranks.store().has("done 2")));
  ranks.signal(2, SIGCONT);
  expect_ok(ranks, 0, kRanks);
}

TEST(Servers, RankWaitsForAStoppedServerAndKeepsItsBits) {
  const TestFolder folder;
  const NamedServer named;
  const int port = free_port();
  ServerProcess server(named.address, {folder.path(), /*lose=*/0});
  server.start();
  ForkedRanks processes(1, [&](int rank, KeyValueStore& store) -> absl::Status {
    join_as(rank, 1, port);
    at::set_num_threads(1);
    const Strategy strategy = served();
    const Mesh mesh = init(strategy);
    std::size_t steps = 0;
    Values got;
    {
      Session session(mesh, strategy);
      for (bool is_over = false; !is_over;) {
        session.train(steps++);
        TESSERA_RETURN_IF_ERROR(store.set("steps", std::to_string(steps)));
        TESSERA_ASSIGN_OR_RETURN(is_over, store.has("goes on"));
      }
      for (int i = 0; i < 3; ++i) session.train(steps++);
      got = session.values();
    }
    require(all_same_bits(got, trained(mesh, strategy, steps)),
            "the bits of a run with a server that never stood still");
    return absl::OkStatus();
  });
  const auto steps = [&] { return std::stoll(value_or_throw(told(processes.store(), "steps"))); };
  constexpr int kFew = 5;
  const auto wait_for_few = [&] {
    Deadline limit(std::chrono::seconds(60));
    for (const long long first = steps(); steps() < first + kFew;) {
      ASSERT_FALSE(limit.passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  wait_for_few();
  const auto begin = std::chrono::steady_clock::now();
  wait_for_few();
  const auto took = std::chrono::steady_clock::now() - begin;
  server.stop();
  // The server may have sent all answers for the step that is under way, but none for the next step.
  const long long before = steps();
  std::this_thread::sleep_for(took);  // a rank that does not wait makes about kFew steps meanwhile
  EXPECT_LE(steps(), before + 1) << "the rank waits";
  EXPECT_TRUE(processes.store().set("goes on", "").ok());
  server.signal(SIGCONT);
  expect_ok(processes, 0, 1);
}

TEST(Servers, LostServerIsNamedByRanks) {
  Servers servers;
  std::vector<std::string> errors(kRanks);
  const std::string address = servers.address(1);
  std::thread ending;
  error_of([&] {
    run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
      Session session(mesh, served(sgd));
      session.train(0);
      barrier(mesh);
      if (mesh.rank() == 0) ending = std::thread([&] { servers.end(1); });
      std::string& error = errors[static_cast<std::size_t>(mesh.rank())];
      error = error_of([&] {
        for (std::size_t i = 1; i < 10'000; ++i) session.train(i);
      });
      // If a pull fails in an operator, the operator throws another error than the pull.
      if (const absl::Status told = groups_of(mesh).status(); !told.ok()) error = message_of(told);
    });
  });
  if (ending.joinable()) ending.join();
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("server 1 (" + address + ") is lost"));
}

TEST(Servers, KilledServerComesBackWithAtMostTheStatedPushesLostAndNoneAppliedTwice) {
  for (const std::int64_t lose : {0, 3}) {
    SCOPED_TRACE(lose);
    const TestFolder folder;
    const std::string address = "127.0.0.1:" + std::to_string(free_port());
    const KeepOptions keep{folder.path(), lose};
    ServerProcess first(address, keep), second(address, keep);
    first.start();
    CountedShard shard(address);
    ASSERT_TRUE(shard.join().ok());
    ASSERT_TRUE(shard.write().ok());
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(shard.wait(shard.push(/*is_early=*/i % 2 == 1)).ok());
    EXPECT_EQ(shard.pushes(), 10);
    std::vector<ServerCourier::Ticket> under_way;
    for (int i = 0; i < 40; ++i) under_way.push_back(shard.push(/*is_early=*/i == 0));
    first.kill();
    second.start();
    for (const auto& ticket : under_way) EXPECT_TRUE(shard.wait(ticket).ok()) << message_of(ticket->status);
    EXPECT_LE(shard.lost(), lose);
    EXPECT_EQ(shard.pushes(), 50 - shard.lost());
  }
}

TEST(Servers, RankWithoutAQuestionJoinsAServerThatHasComeBack) {
  const TestFolder folder;
  const KeepOptions keep{folder.path(), 0};
  auto server = value_or_throw(ParameterServer::start("127.0.0.1:0", kSecret, keep));
  const std::string address = server->address();
  CountedShard shard(address);
  ASSERT_TRUE(shard.join().ok());
  ASSERT_TRUE(shard.write().ok());
  server.reset();
  server = value_or_throw(ParameterServer::start(address, kSecret, keep));
  EXPECT_FALSE(server->may_end()) << "the rank may come back";
  for (int i = 0; i < 1000 && server->is_idle(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(server->is_idle());
  EXPECT_EQ(shard.pushes(), 0);
  EXPECT_TRUE(value_or_throw(ParameterServer::start("127.0.0.1:0", kSecret))->may_end()) << "it keeps nothing";
}

TEST(Servers, RankAloneKeepsItsBitsAndOthersTheirStepsWhenAServerIsKilledAmidThem) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const TestFolder folder;
    const NamedServer named;
    const std::string& address = named.address;
    const int port = free_port();
    const KeepOptions keep{folder.path(), /*lose=*/0};
    ServerProcess first(address, keep), second(address, keep);
    first.start();
    ForkedRanks processes(ranks, [&](int rank, KeyValueStore& store) -> absl::Status {
      join_as(rank, ranks, port, /*hosts=*/1);
      at::set_num_threads(1);
      const Strategy strategy = served();
      const Mesh mesh = init(strategy);
      std::size_t steps = 0;
      Values got;
      {
        Session session(mesh, strategy);
        const auto train = [&] { session.train(steps++); };
        train();
        TESSERA_RETURN_IF_ERROR(store.set("trains" + std::to_string(rank), ""));
        for (bool is_over = false; !is_over; train()) {
          TESSERA_ASSIGN_OR_RETURN(is_over, store.has("is back"));
        }
        for (int i = 0; i < 3; ++i) train();
        require(session.engine.steps_applied() == static_cast<std::int64_t>(steps), "all steps count");
        barrier(mesh);
        got = session.values();
        barrier(mesh);
      }
      if (ranks == 1) require(all_same_bits(got, trained(mesh, strategy, steps)), "the bits of an unbroken run");
      return absl::OkStatus();
    });
    for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(told(processes.store(), "trains" + std::to_string(rank)).ok());
    first.kill();
    second.start();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // ranks go on meanwhile
    EXPECT_TRUE(processes.store().set("is back", "").ok());
    expect_ok(processes, 0, ranks);
  }
}

TEST(Servers, RoundsKeepTheirBitsWhenAServerIsKilledAmidThem) {
  constexpr int kHere = 2;
  const TestFolder folder;
  const NamedServer named;
  const std::string& address = named.address;
  const int port = free_port();
  const KeepOptions keep{folder.path(), /*lose=*/0};
  ServerProcess first(address, keep), second(address, keep);
  first.start();
  ForkedRanks processes(kHere, [&](int rank, KeyValueStore& store) -> absl::Status {
    join_as(rank, kHere, port, /*hosts=*/1);
    at::set_num_threads(1);
    const Strategy strategy = served([](Strategy& s) { sgd(s), s.sync.asynchronous.max_staleness = 0; });
    const Mesh mesh = init(strategy);
    const auto values_of_run = [&] {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 30; ++i) {
        session.train(i);
        if (i == 2) throw_if_error(store.set("trains" + std::to_string(rank), ""));
      }
      barrier(mesh);
      Values values = session.values();
      barrier(mesh);
      return values;
    };
    const Values broken = values_of_run();
    require(all_same_bits(broken, values_of_run()), "the bits of an unbroken run");
    return absl::OkStatus();
  });
  EXPECT_TRUE(told(processes.store(), "trains0").ok());
  first.kill();
  second.start();
  expect_ok(processes, 0, kHere);
}

TEST(Servers, ServerThatComesBackWithoutItsFolderIsNamedAndNotTaken) {
  const TestFolder folder, other;
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  ServerProcess first(address, {folder.path(), 0}), second(address, {other.path(), 0});
  first.start();
  CountedShard shard(address);
  ASSERT_TRUE(shard.join().ok());
  ASSERT_TRUE(shard.write().ok());
  first.kill();
  second.start();
  const absl::Status status = shard.wait(shard.push());
  EXPECT_EQ(exit_code_of(status), ExitCode::kUnavailable);
  EXPECT_THAT(message_of(status), HasSubstr("server 0 is lost, and has not come back"));
  EXPECT_THAT(message_of(status), HasSubstr("has nothing of the run any more"));
}

TEST(Servers, OrderOfOtherOwnersIsRefusedByName) {
  const Servers servers(1);
  const TestFolder folder;
  Strategy strategy = served();
  strategy.sync.asynchronous.record_order = folder / "order.jsonl";
  run(strategy, 1);
  strategy.sync.asynchronous.record_order.clear();
  strategy.sync.asynchronous.play_order = folder / "order.jsonl";
  strategy.sync.asynchronous.owners = ShardOwners::kRanks;
  EXPECT_THAT(error_of([&] { run(strategy, 1); }),
              HasSubstr("of shards that 1 servers own, and in this run 3 ranks do"));
  const Servers more(2);
  strategy.sync.asynchronous.owners = ShardOwners::kServers;
  EXPECT_THAT(error_of([&] { run(strategy, 1); }),
              HasSubstr("of shards that 1 servers own, and in this run 2 servers do"));
}

TEST(Servers, GlooIsTakenWithServersAlone) {
  const auto error_with = [](const std::string& owners) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "comm": {"transport": "gloo"}, "sync": {"type": )" +
                          std::string(R"("asynchronous", "owners": ")") + owners + R"("}})");
    });
  };
  EXPECT_EQ(error_with("servers"), "");
  EXPECT_THAT(error_with("ranks"), HasSubstr("comm.transport gloo"));
  EXPECT_THAT(
      error_of([] {
        Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "hogwild", "owners": "servers"}})");
      }),
      HasSubstr("sync.type asynchronous"));
}

TEST(Servers, ServersOfTheLauncherThatTheStrategyDoesNotUseAreRefused) {
  const NamedServers named("127.0.0.1:1");
  Strategy strategy = served();
  strategy.sync = {};
  EXPECT_EQ(error_of([&] { run(strategy, 1, /*ranks=*/1); }), "") << "no launcher has started them";
  setenv("TESSERA_LAUNCHER", "tessera", 1);
  EXPECT_THAT(error_of([&] { run(strategy, 1, /*ranks=*/1); }),
              AllOf(HasSubstr("/sync/owners"), HasSubstr("--servers"), HasSubstr("hint: set \"sync\"")));
  unsetenv("TESSERA_LAUNCHER");
}

TEST(Servers, MissingServersAndBadAddressesAreNamed) {
  unsetenv("TESSERA_SERVERS");
  EXPECT_THAT(error_of([] { run(served(), 1); }), HasSubstr("needs the variable TESSERA_SERVERS"));
  {
    const NamedServers named("nowhere");
    EXPECT_THAT(error_of([] { run(served(), 1); }), HasSubstr("is no address of a parameter server"));
  }
  EXPECT_THAT(message_of(ParameterServer::start("127.0.0.1:0", "short").status()), HasSubstr("the secret of a job"));
  EXPECT_THAT(message_of(ParameterServer::start("127.0.0.1:x", kSecret).status()), HasSubstr("is no address"));
}

}  // namespace servers_test
}  // namespace tessera::testing
