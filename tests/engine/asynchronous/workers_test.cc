// Tests "sync": {"elastic": true}: workers join and leave a run whose shards parameter servers own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/parameter_server.h"
#include "engine/asynchronous/servers/server_link.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "tessera/checkpoint.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace servers_test {

using ::testing::HasSubstr;
using ::testing::Not;

// Worker 0 trains, worker 1 joins after some steps, and worker 2 is killed during a step of its own.
TEST(Servers, WorkersJoinLateAndAreKilledAndEachStepIsMadeOnce) {
  constexpr std::int64_t kSteps = 24;
  for (const Adjust& adjust : {Adjust(sgd), Adjust([](Strategy& s) { s.sync.asynchronous.max_staleness = 1; })}) {
    const NamedServer named;
    const int port = free_port();
    ForkedRanks workers(3, [&](int worker, KeyValueStore& store) -> absl::Status {
      join_as(0, 1, port, /*hosts=*/1);
      at::set_num_threads(1);
      const Strategy strategy = elastic(adjust);
      const Mesh mesh = init(strategy);
      if (worker == 1) TESSERA_RETURN_IF_ERROR(told(store, "steps were made").status());
      Session session(mesh, strategy);
      if (worker == 1) TESSERA_RETURN_IF_ERROR(store.set("joined", ""));
      std::int64_t made = 0;
      while (const auto step = session.engine.take_step(kSteps)) {
        if (worker == 2 && made == 1) {
          TESSERA_RETURN_IF_ERROR(store.set("holds a step", ""));
          ::raise(SIGKILL);
        }
        session.train(static_cast<std::size_t>(*step));
        if (worker == 1 && made == 0) require(session.engine.steps_applied() > 4, "it counts the steps of all");
        TESSERA_RETURN_IF_ERROR(store.add("step " + std::to_string(*step), 1).status());
        if (++made != 4 || worker != 0) continue;
        TESSERA_RETURN_IF_ERROR(store.set("steps were made", ""));
        TESSERA_RETURN_IF_ERROR(told(store, "joined").status());
        TESSERA_RETURN_IF_ERROR(told(store, "holds a step").status());
      }
      require(session.engine.steps_are_over(), "take_step returns nothing at the end alone");
      if (!session.engine.writes_results()) return absl::OkStatus();
      session.engine.note_results_written();
      return store.add("workers that write", 1).status();
    });
    const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));
    EXPECT_EQ(workers.wait(2).signal, SIGKILL);
    expect_ok(workers, 0, 2);
    for (std::int64_t step = 0; step < kSteps; ++step)
      EXPECT_EQ(value_or_throw(workers.store().add("step " + std::to_string(step), 0)), 1) << step;
    EXPECT_EQ(value_or_throw(workers.store().add("workers that write", 0)), 1);
  }
}

/// Writes a value to all parameters.
void fill(Session& session) {
  Gathered guard(session.engine, Gathered::kWrite);
  const at::NoGradGuard no_grad;
  for (auto& parameter : session.model->parameters()) parameter.fill_(0.25);
  guard.close();
}

// Workers that join after the first one get the servers' values, whatever values their programs have set. A save has
// values and states of one moment, though other workers may push meanwhile.
TEST(Servers, LaterWorkerBeginsWithTheValuesOfTheServers) {
  at::set_num_threads(1);
  const Servers servers;
  Values trained_values;
  const TestFolder folder;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(session.engine.take_step(10), std::optional(static_cast<std::int64_t>(i)));
      session.train(i);
    }
    EXPECT_FALSE(session.engine.writes_results());
    save_checkpoint(session.engine, folder.path());
    trained_values = session.values();
    EXPECT_THAT(error_of([&] { fill(session); }), HasSubstr("after training has begun"));
  });
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    fill(session);
    EXPECT_TRUE(all_same_bits(session.values(), trained_values));
    session.train(3);
    EXPECT_EQ(session.engine.steps_applied(), 4);
    EXPECT_EQ(session.engine.take_step(10), std::optional<std::int64_t>(3));
    EXPECT_THAT(error_of([&] { session.engine.take_step(11); }), HasSubstr("with the same number of steps"));
  });
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    EXPECT_THAT(error_of([&] { session.engine.take_step(10, /*data_order=*/5); }),
                HasSubstr("other data than the others"));
  });
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    EXPECT_THAT(error_of([&] { Session(mesh, elastic()); }), HasSubstr("has other shards here"))
        << "another optimizer has other states";
  });
}

/// Makes the only step of a run, so that this worker is the one that writes the results.
void make_the_only_step(Session& session) {
  EXPECT_EQ(session.engine.take_step(1), std::optional<std::int64_t>(0));
  session.train(0);
  EXPECT_FALSE(session.engine.take_step(1).has_value());
  EXPECT_TRUE(session.engine.writes_results());
}

TEST(Servers, LateWorkerWritesTheResultsUnlessTheyAreWritten) {
  at::set_num_threads(1);
  for (const bool are_written : {false, true}) {
    const Servers servers;
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Session session(mesh, elastic(sgd));
      make_the_only_step(session);
      if (are_written) session.engine.note_results_written();
    });
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Session session(mesh, elastic(sgd));
      EXPECT_FALSE(session.engine.take_step(1).has_value());
      // The server may notice a little later that the first worker has left.
      for (int i = 0; i < 500 && !are_written && !session.engine.writes_results(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        session.engine.take_step(1);
      }
      EXPECT_EQ(session.engine.writes_results(), !are_written);
      const std::string error = error_of([&] { session.engine.note_results_written(); });
      if (are_written) {
        EXPECT_THAT(error, HasSubstr("was not to write the results"));
      } else {
        EXPECT_EQ(error, "");
      }
    });
  }
}

// The first server ends the worker's connection without an answer, and the next server starts after that.
TEST(Servers, WorkerJoinsTheNextServerWhenItsServerIsKilledWhileItJoins) {
  at::set_num_threads(1);
  const NamedServer named;
  const ServerSocket first = value_or_throw(listen_for_workers(named.address));
  std::unique_ptr<ParameterServer> second;
  const std::jthread servers([&] {
    pollfd ready{first.socket, POLLIN, 0};
    ::poll(&ready, 1, /*timeout=*/30'000);
    const int worker = ::accept(first.socket, nullptr, nullptr);
    ::close(first.socket);
    if (worker >= 0) ::close(worker);
    second = value_or_throw(ParameterServer::start(named.address, kSecret));
  });
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    EXPECT_EQ(session.engine.take_step(1), std::optional<std::int64_t>(0));
    session.train(0);
  });
}

TEST(Servers, WorkerThatHasWrittenTheResultsEndsWellThoughTheServerIsLost) {
  at::set_num_threads(1);
  Servers servers(1);
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    make_the_only_step(session);
    servers.end(0);
    const std::string said = stderr_of([&] { session.engine.note_results_written(); });
    EXPECT_THAT(said, HasSubstr("the results are written, but server 0 cannot note it"));
    session.engine.check();
  });
}

/// Connects a worker with a server, and passes on their messages until the test breaks the worker's connection.
class Bridge {
 public:
  explicit Bridge(std::string server)
      : server_(std::move(server)),
        entry_(value_or_throw(listen_for_workers("127.0.0.1:0"))),
        thread_([this] { run(); }) {}

  const std::string& address() const { return entry_.address; }
  /// Breaks the connection after one more answer of the server.
  void break_after_an_answer() { is_to_break_ = true; }

 private:
  void run() {
    constexpr std::chrono::milliseconds kLimit{10'000};
    pollfd entry{entry_.socket, POLLIN, 0};
    ::poll(&entry, 1, /*timeout=*/30'000);
    ServerLink worker(::accept(entry_.socket, nullptr, nullptr));
    ::close(entry_.socket);
    const auto server = value_or_throw(ServerLink::connect(server_, ServerLink::Clock::now() + kLimit));
    std::vector<std::byte> bytes(4096);
    for (;;) {
      std::array<pollfd, 2> ends = {{{worker.socket(), POLLIN, 0}, {server->socket(), POLLIN, 0}}};
      ::poll(ends.data(), ends.size(), /*timeout=*/-1);
      if (ends[0].revents != 0) {
        const auto got = worker.receive_some(bytes);
        if (!got.ok() || !server->send(std::span(bytes).first(*got), kLimit).ok()) return;
      }
      if (ends[1].revents != 0) {
        const auto head = server->receive_head(kLimit);
        if (!head.ok()) return;
        std::vector<std::byte> payload(static_cast<std::size_t>(head->bytes));
        if (!server->receive(payload, kLimit).ok() || !worker.send(*head, payload, kLimit).ok()) return;
        if (is_to_break_) return;
      }
    }
  }

  const std::string server_;
  const ServerSocket entry_;
  std::atomic<bool> is_to_break_ = false;
  std::jthread thread_;  // the thread uses the members above, so this member is destroyed first
};

// The worker asks server 1 for a unit in advance, and never gets the unit. Server 0 nevertheless notes the results.
TEST(Servers, ResultsAreNotedWhenAServerOtherThanTheFirstIsLost) {
  at::set_num_threads(1);
  const Servers servers(2);
  Bridge bridge(servers.address(1));
  const NamedServers named(servers.address(0) + "," + bridge.address());
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, elastic(sgd));
    make_the_only_step(session);
    bridge.break_after_an_answer();
    const at::NoGradGuard no_grad;
    session.model->embedding->forward(session.batches[0].tokens);
    const std::string said = stderr_of([&] { session.engine.note_results_written(); });
    EXPECT_THAT(said, Not(HasSubstr("cannot note")));
    session.engine.check();
  });
}

TEST(Servers, WorkerWaitsForTheFirstOneLongerThanForAStart) {
  at::set_num_threads(1);
  const Servers servers;
  const Strategy strategy = elastic([](Strategy& s) { s.comm.init_timeout_s = 2, s.comm.timeout_s = 20; });
  std::string error;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session first(mesh, strategy);
    std::jthread late(
        [&] { error = error_of([&] { run_ranks({.ranks = 1}, [&](const Mesh& own) { Session(own, strategy); }); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    EXPECT_EQ(first.engine.take_step(2), std::optional<std::int64_t>(0));
    late.join();
  });
  EXPECT_EQ(error, "");
}

// A worker that has joined may take long to load its model and its data. It limits the lead of the other workers only
// from its first pull on.
TEST(Servers, WorkerThatHasJoinedHoldsNobodyUpBeforeItsFirstPull) {
  at::set_num_threads(1);
  const Servers servers;
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    const Strategy strategy = elastic([](Strategy& s) { s.sync.asynchronous.max_staleness = 1, s.comm.timeout_s = 3; });
    Session first(mesh, strategy);
    const auto make_step = [](Session& session) {
      session.train(static_cast<std::size_t>(session.engine.take_step(20).value_or(0)));
    };
    make_step(first);
    Session late(mesh, strategy);
    for (int i = 0; i < 5; ++i) make_step(first);
    make_step(late);
    make_step(first);
    make_step(first);
  });
}

// Steps, pushes and waits are under way when the server is killed. The last worker comes when the run is over, to a
// server that was started after the other workers had ended.
TEST(Servers, EachStepIsMadeOnceWhenTheServerIsKilledAmidWorkersAndComesBack) {
  constexpr std::int64_t kSteps = 40;
  for (const Adjust& adjust : {Adjust(sgd), Adjust([](Strategy& s) { s.sync.asynchronous.max_staleness = 1; })}) {
    const NamedServer named;
    const TestFolder folder;
    const int port = free_port();
    const KeepOptions keep{folder.path(), /*lose=*/0};
    ServerProcess first(named.address, keep), second(named.address, keep), third(named.address, keep);
    first.start();
    ForkedRanks workers(3, [&](int worker, KeyValueStore& store) -> absl::Status {
      if (worker == 2) TESSERA_RETURN_IF_ERROR(told(store, "is over", std::chrono::seconds(60)).status());
      join_as(0, 1, port, /*hosts=*/1);
      at::set_num_threads(1);
      const Strategy strategy = elastic(adjust);
      const Mesh mesh = init(strategy);
      Session session(mesh, strategy);
      std::int64_t made = 0;
      while (const auto step = session.engine.take_step(kSteps)) {
        session.train(static_cast<std::size_t>(*step));
        TESSERA_RETURN_IF_ERROR(store.add("step " + std::to_string(*step), 1).status());
        if (++made == 2) TESSERA_RETURN_IF_ERROR(store.set("trains" + std::to_string(worker), ""));
        if (made == 4 && worker == 0) TESSERA_RETURN_IF_ERROR(told(store, "is back").status());
      }
      require(session.engine.steps_applied() <= kSteps, "no push is applied twice");
      require(worker < 2 || made == 0, "nothing is left to the last worker");
      if (!session.engine.writes_results()) return absl::OkStatus();
      session.engine.note_results_written();
      return store.add("workers that write", 1).status();
    });
    for (const char* worker : {"trains0", "trains1"}) EXPECT_TRUE(told(workers.store(), worker).ok());
    first.kill();
    second.start();
    EXPECT_TRUE(workers.store().set("is back", "").ok());
    expect_ok(workers, 0, 2);
    second.kill();
    third.start();
    EXPECT_TRUE(workers.store().set("is over", "").ok());
    expect_ok(workers, 2, 3);
    for (std::int64_t step = 0; step < kSteps; ++step)
      EXPECT_EQ(value_or_throw(workers.store().add("step " + std::to_string(step), 0)), 1) << step;
    EXPECT_EQ(value_or_throw(workers.store().add("workers that write", 0)), 1);
  }
}

TEST(Servers, TwoRanksAreNoWorkerThatComesAndGoes) {
  const Servers servers(1);
  EXPECT_THAT(error_of([] { run(elastic(), 1); }), HasSubstr("is a job of one rank, and this job has 3"));
  setenv("TESSERA_WORKER", "0", 1);
  EXPECT_THAT(error_of([] { run(served(), 1); }), HasSubstr("set \"elastic\": true"));
  unsetenv("TESSERA_WORKER");
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, served());
    EXPECT_THAT(error_of([&] { session.engine.take_step(3); }), HasSubstr("is for workers that come and go"));
    EXPECT_TRUE(session.engine.writes_results());
  });
}

TEST(Servers, ElasticGoesWithServersAndWithoutOrdersAndCheckpointFolders) {
  const auto error_with = [](const std::string& keys) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "elastic": true)" + keys +
                          "}");
    });
  };
  const std::string on_servers = R"(, "owners": "servers")";
  EXPECT_EQ(error_with(on_servers + "}"), "");
  EXPECT_THAT(error_with("}"), HasSubstr("sync.owners servers"));
  EXPECT_THAT(error_with(on_servers + R"(, "record_order": "a"})"), HasSubstr("an order is one of ranks that stay"));
  EXPECT_THAT(error_with(on_servers + R"(}, "checkpoint": {"dir": "a"})"), HasSubstr("would save there by itself"));
}

// The first worker gives server 1 its first values, and ends before it reports this to server 0. So server 0 lets
// another worker give the values.
TEST(Servers, NextWorkerGivesTheFirstValuesWhereOnlyServerOneHadThem) {
  const Servers servers(1);
  const auto give = [&](RawWorker& worker) {
    EXPECT_EQ(worker.place.kind, MessageKind::kDone);
    EXPECT_EQ(worker.ask(MessageKind::kWrite).kind, MessageKind::kDone);
    EXPECT_EQ(worker.ask(MessageKind::kBegin).kind, MessageKind::kDone);
  };
  {
    RawWorker first(servers.address(0), /*server=*/1, /*number=*/0);
    give(first);
  }
  RawWorker second(servers.address(0), /*server=*/1, /*number=*/1);
  give(second);
  EXPECT_EQ(second.ask(MessageKind::kPush, second.push_of_zeros()).kind, MessageKind::kDone);
  second.send(MessageKind::kWrite, 0, {});
  EXPECT_TRUE(second.is_dropped()) << "the shard was pushed to";
}

}  // namespace servers_test
}  // namespace tessera::testing
