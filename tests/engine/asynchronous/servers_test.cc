// Tests "sync": {"type": "asynchronous", "owners": "servers"}: parameter servers own the shards, and ranks talk to them
// alone. The servers are threads of this process, and ranks are threads, or processes on hosts of their own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/job_members.h"
#include "engine/asynchronous/servers/parameter_server.h"
#include "engine/asynchronous/servers/served_job.h"
#include "engine/asynchronous/servers/server_courier.h"
#include "engine/asynchronous/servers/server_link.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace servers_test {

using ::testing::HasSubstr;

constexpr int kRanks = 3, kServers = 2;
constexpr char kSecret[] = "a secret of this test";

/// Parameter servers, which the environment names while this object lives.
class Servers {
 public:
  explicit Servers(int count = kServers, const std::string& offload = "") {
    std::string all;
    for (int i = 0; i < count; ++i) {
      servers_.push_back(value_or_throw(ParameterServer::start("127.0.0.1:0", kSecret, {}, offload)));
      all += (i == 0 ? "" : ",") + servers_.back()->address();
    }
    setenv("TESSERA_SERVERS", all.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  }
  ~Servers() {
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
  Servers(const Servers&) = delete;
  Servers& operator=(const Servers&) = delete;

  void end(std::size_t server) { servers_[server].reset(); }
  const std::string& address(std::size_t server) const { return servers_[server]->address(); }

 private:
  std::vector<std::unique_ptr<ParameterServer>> servers_;
};

void sgd(Strategy& s) { s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0, .momentum = 0.9}; }

Strategy served(const Adjust& adjust = nullptr) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0;
  strategy.sync.type = SyncType::kAsynchronous;
  strategy.sync.asynchronous.owners = ShardOwners::kServers;
  if (adjust) adjust(strategy);
  return strategy;
}

struct Ran {
  std::vector<std::vector<double>> losses;  ///< [rank][step]
  std::int64_t oldest = 0;
  Values values;  ///< the values after all ranks have pushed
};

Ran run(const Strategy& strategy, std::size_t steps) {
  Ran result;
  result.losses.resize(kRanks);
  std::array<std::int64_t, kRanks> oldest{};
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t i = 0; i < steps; ++i) {
      const StepResult step = session.train(i);
      result.losses[rank].push_back(step.loss);
      oldest[rank] = std::max(oldest[rank], step.staleness_max);
    }
    barrier(mesh);
    Values values = session.values();
    if (rank == 0) result.values = std::move(values);
  });
  result.oldest = *std::ranges::max_element(oldest);
  return result;
}

const Adjust kOptions[] = {nullptr, [](Strategy& s) { sgd(s), s.sync.asynchronous.scale = AgeScale::kInverse; },
                           [](Strategy& s) {
                             s.sync.asynchronous.scale = AgeScale::kInverse;
                             s.sync.asynchronous.delay_compensation.lambda = 0.5;
                           },
                           [](Strategy& s) { s.gradient_accumulation = 2, s.sync.asynchronous.max_staleness = 1; },
                           [](Strategy& s) { sgd(s), s.sync.asynchronous.max_staleness = 0; }};

TEST(Servers, RecordedAndPlayedRunsEqualPlainLibTorchThatPlaysTheirOrder) {
  at::set_num_threads(1);
  const Servers servers;
  for (std::size_t option = 0; option < std::size(kOptions); ++option) {
    SCOPED_TRACE(option);
    const TestFolder folder;
    Strategy strategy = served(kOptions[option]);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran got = run(strategy, 5);
    OrderOracle oracle(strategy, kRanks, {}, kServers);
    oracle.play(read_lines(folder / "order.jsonl"));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));

    strategy.sync.asynchronous.play_order = folder / "order.jsonl";
    strategy.sync.asynchronous.record_order = folder / "again.jsonl";
    const Ran again = run(strategy, 5);
    EXPECT_EQ(got.losses, again.losses);
    EXPECT_TRUE(all_same_bits(got.values, again.values));
  }
}

TEST(Servers, RandomOrdersEqualPlainLibTorch) {
  at::set_num_threads(1);
  const Servers servers;
  const TestFolder folder;
  std::int64_t oldest = 0;
  for (std::uint64_t seed = 0; seed < 9; ++seed) {
    SCOPED_TRACE(seed);
    const std::size_t option = seed % 3;
    Strategy strategy = served(kOptions[option]);
    const std::string recorded = folder / std::to_string(option);
    if (seed == option) {
      strategy.sync.asynchronous.record_order = recorded;
      run(strategy, 4);
      strategy.sync.asynchronous.record_order.clear();
    }
    const auto order = shuffled(read_lines(recorded), kRanks, seed);
    write_lines(folder / "random.jsonl", kRanks, order);
    strategy.sync.asynchronous.play_order = folder / "random.jsonl";
    const Ran got = run(strategy, 4);
    OrderOracle oracle(strategy, kRanks, {}, kServers);
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
  const Servers servers(1, folder / "none");
  EXPECT_THAT(error_of([&] { run(strategy, 1); }), HasSubstr("No such file or directory"));
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
    const int port = free_port(), served_at = free_port();
    const std::string address = "127.0.0.1:" + std::to_string(served_at);
    setenv("TESSERA_SERVERS", address.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
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
      return store.get("rank 1 has ended", std::chrono::seconds(60)).status();
    });
    const auto server = value_or_throw(ParameterServer::start(address, kSecret));  // ranks wait for this server
    EXPECT_EQ(ranks.wait(2).signal, SIGKILL);
    for (int rank = 0; rank < 2; ++rank) {
      const RankEnd end = ranks.wait(rank);
      EXPECT_EQ(end.signal, 0) << rank;
      EXPECT_EQ(end.exit_code, ExitCode::kOk) << rank << ": " << end.message;
    }
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
}

Strategy elastic(const Adjust& adjust = nullptr) {
  Strategy strategy = served(adjust);
  strategy.sync.asynchronous.elastic = true;
  return strategy;
}

/// Names a server at a port of this host, which may start later, while this object lives.
struct NamedServer {
  NamedServer() {
    setenv("TESSERA_SERVERS", address.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  }
  ~NamedServer() {
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
};

// Worker 0 trains, worker 1 joins after some steps, and worker 2 is killed during a step of its own.
TEST(Servers, WorkersJoinLateAndAreKilledAndEachStepIsMadeOnce) {
  constexpr std::int64_t kSteps = 24;
  for (const Adjust& adjust : {Adjust(sgd), Adjust([](Strategy& s) { s.sync.asynchronous.max_staleness = 1; })}) {
    const NamedServer named;
    const int port = free_port();
    ForkedRanks workers(3, [&](int worker, KeyValueStore& store) -> absl::Status {
      const auto hear = [&](const char* what) { return store.get(what, std::chrono::seconds(60)).status(); };
      join_as(0, 1, port, /*hosts=*/1);
      at::set_num_threads(1);
      const Strategy strategy = elastic(adjust);
      const Mesh mesh = init(strategy);
      if (worker == 1) TESSERA_RETURN_IF_ERROR(hear("steps were made"));
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
        TESSERA_RETURN_IF_ERROR(hear("joined"));
        TESSERA_RETURN_IF_ERROR(hear("holds a step"));
      }
      require(session.engine.steps_are_over(), "take_step returns nothing at the end alone");
      return store.add("workers that write", session.engine.writes_results() ? 1 : 0).status();
    });
    const auto server = value_or_throw(ParameterServer::start(named.address, kSecret));
    EXPECT_EQ(workers.wait(2).signal, SIGKILL);
    for (int worker = 0; worker < 2; ++worker) {
      const RankEnd end = workers.wait(worker);
      EXPECT_EQ(end.signal, 0) << worker;
      EXPECT_EQ(end.exit_code, ExitCode::kOk) << worker << ": " << end.message;
    }
    for (std::int64_t step = 0; step < kSteps; ++step)
      EXPECT_EQ(value_or_throw(workers.store().add("step " + std::to_string(step), 0)), 1) << step;
    // The second worker is told to write too if the first one has left before the second one asks.
    const std::int64_t writers = value_or_throw(workers.store().add("workers that write", 0));
    EXPECT_TRUE(writers == 1 || writers == 2) << writers;
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
// values and states of one moment, though others may push meanwhile.
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
    EXPECT_THAT(error_of([&] { Session(mesh, elastic()); }), HasSubstr("has other shards here"))
        << "another optimizer has other states";
  });
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

/// A worker all of whose messages are written by a test. It joins an elastic run with one parameter of 64 numbers,
/// which the last server owns. `server`: the number of this last one. `number`: the worker's number.
class RawWorker {
 public:
  explicit RawWorker(const std::string& address, int server = 0, int number = JobMembers::kAnyNumber)
      : link_(value_or_throw(ServerLink::connect(address, ServerLink::Clock::now() + kLimit))) {
    const std::string secret = kSecret;
    EXPECT_EQ(ask(MessageKind::kSecret, std::as_bytes(std::span(secret))).kind, MessageKind::kDone);
    const std::string definition = std::string(32, '-') + definition_for(server).dump();
    place = ask(MessageKind::kJoin, std::as_bytes(std::span(definition)), /*first=*/number);
  }

  static nlohmann::json definition_for(int server) {
    const std::vector<std::int64_t> numels = {64}, options = {-1};
    const nlohmann::json group = {{"unit", "a"},      {"unit_index", 0}, {"group", 0},
                                  {"numels", numels}, {"parts", 1},      {"options", options}};
    return {{"ranks", 1},
            {"server", server},
            {"servers", server + 1},
            {"timeout_s", 10},
            {"strategy", elastic().to_json()},
            {"groups", nlohmann::json::array({group})}};
  }

  MessageHead ask(MessageKind kind, std::span<const std::byte> payload = {}, std::int64_t first = 0) {
    send(kind, static_cast<std::int64_t>(payload.size()), payload, first);
    return value_or_throw(link_->receive_head(kLimit));
  }
  /// Sends a message head that announces `bytes` bytes, and then `payload`.
  void send(MessageKind kind, std::int64_t bytes, std::span<const std::byte> payload, std::int64_t first = 0,
            std::uint32_t shard = 0) {
    MessageHead head;
    head.kind = kind;
    head.bytes = bytes;
    head.first = first;
    head.shard = shard;
    require(link_->send(bytes_of(head), kLimit).ok(), "it is sent");
    link_->send(payload, kLimit).IgnoreError();  // the server may have ended the connection
  }
  /// Returns whether the server ends the connection without an answer.
  bool is_dropped() { return !link_->receive_head(kLimit).ok(); }
  /// Returns the version of the shard and its numbers.
  std::pair<std::int64_t, std::vector<float>> shard() {
    const MessageHead head = ask(MessageKind::kCopy);
    std::vector<float> numbers(static_cast<std::size_t>(head.bytes) / sizeof(float));
    require(link_->receive(std::as_writable_bytes(std::span(numbers)), kLimit).ok(), "it has come");
    return {head.first, numbers};
  }

  MessageHead place;

 private:
  static constexpr std::chrono::milliseconds kLimit{10'000};
  std::unique_ptr<ServerLink> link_;
};

TEST(Servers, HostilePushesEndTheirConnectionAndChangeNothing) {
  const Servers servers(1);
  RawWorker first(servers.address(0));
  EXPECT_EQ(first.place.first, 0);
  EXPECT_EQ(first.place.turn, 1) << "it gives the first values";
  EXPECT_EQ(RawWorker(servers.address(0)).place.kind, MessageKind::kBusy);
  EXPECT_EQ(first.ask(MessageKind::kBegin).kind, MessageKind::kDone);
  const auto before = first.shard();
  EXPECT_GE(before.second.size(), 64u);
  const std::vector<std::byte> zeros(300);
  const auto joined = [&] {
    auto worker = std::make_unique<RawWorker>(servers.address(0));
    EXPECT_EQ(worker->place.kind, MessageKind::kDone);
    EXPECT_NE(worker->place.turn, 1);
    return worker;
  };
  for (const std::int64_t bytes : {0L, 300L, 1L << 40}) {
    const auto worker = joined();
    worker->send(MessageKind::kPush, bytes, std::span(zeros).first(bytes == 300 ? 300 : 0));
    EXPECT_TRUE(worker->is_dropped()) << "a push of " << bytes << " bytes";
  }
  for (const MessageKind kind :
       {MessageKind::kPush, MessageKind::kStage, MessageKind::kApply, MessageKind::kPull, MessageKind::kReadCounts}) {
    const auto worker = joined();
    worker->send(kind, 0, {}, 0, /*shard=*/7);
    EXPECT_TRUE(worker->is_dropped()) << "a unit that does not exist";
  }
  const OptimizerConfig optimizer = elastic().optimizer;
  const std::size_t numbers = LearningRates(optimizer).all().size() + UpdateOptions(optimizer).all().size();
  const std::vector<std::byte> push(sizeof(PushedNumbers) + numbers * sizeof(double) + 1 +
                                    before.second.size() * sizeof(float));
  const auto push_bytes = static_cast<std::int64_t>(push.size());
  joined()->send(MessageKind::kPush, push_bytes, std::span(push).first(push.size() - 8));  // then the worker ends
  {
    const auto worker = joined();
    const auto without_gradients = std::span(push).first(push.size() - 64 * sizeof(float));
    worker->send(MessageKind::kApply, static_cast<std::int64_t>(without_gradients.size()), without_gradients);
    EXPECT_TRUE(worker->is_dropped()) << "gradients that never came";
  }
  {
    const auto worker = joined();
    worker->send(MessageKind::kWrite, 0, {});
    EXPECT_TRUE(worker->is_dropped()) << "values after the start";
  }
  const auto worker = joined();
  worker->send(MessageKind::kTake, 8, std::span(zeros).first(8), 5);
  EXPECT_TRUE(worker->is_dropped()) << "a question with a payload that it does not have";
  EXPECT_EQ(joined()->ask(MessageKind::kTake, {}, -5).kind, MessageKind::kRefused);
  EXPECT_EQ(joined()->ask(MessageKind::kBegin).kind, MessageKind::kRefused) << "the first values were given";
  EXPECT_EQ(first.shard(), before);
  EXPECT_EQ(first.ask(MessageKind::kPush, push).kind, MessageKind::kDone);
  EXPECT_EQ(first.shard().first, 1) << "a whole push counts";
}

TEST(Servers, DefinitionThatMakesNoLayoutIsRefused) {
  const auto code_with = [](const char* key, const nlohmann::json& value) {
    nlohmann::json all = RawWorker::definition_for(0);
    all["groups"][0][key] = value;
    return exit_code_of(ServedJob::make(std::string(ServedJob::kRunName, '-') + all.dump(), {}, "").status());
  };
  EXPECT_EQ(code_with("parts", 1), ExitCode::kOk);
  EXPECT_EQ(code_with("parts", 0), ExitCode::kConfig);
  for (const std::int64_t numel : {std::int64_t{-1}, std::int64_t{1} << 60})
    EXPECT_EQ(code_with("numels", nlohmann::json::array({numel})), ExitCode::kConfig) << numel;
}

// The first worker has told server 1 that its values are there, and ends before it tells server 0. So server 0 lets
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
  const std::size_t elements = second.shard().second.size();
  const OptimizerConfig optimizer = elastic().optimizer;
  const std::size_t numbers = LearningRates(optimizer).all().size() + UpdateOptions(optimizer).all().size();
  const std::vector<std::byte> push(sizeof(PushedNumbers) + numbers * sizeof(double) + 1 + elements * sizeof(float));
  EXPECT_EQ(second.ask(MessageKind::kPush, push).kind, MessageKind::kDone);
  second.send(MessageKind::kWrite, 0, {});
  EXPECT_TRUE(second.is_dropped()) << "the shard was pushed to";
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
      // An operator throws its own error where a pull failed.
      if (const absl::Status told = groups_of(mesh).status(); !told.ok()) error = message_of(told);
    });
  });
  if (ending.joinable()) ending.join();
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("server 1 (" + address + ") is lost"));
}

/// A parameter server in a process of its own, which can be killed. The process waits until the server is started, so
/// that all processes can be forked before the test has threads.
class ServerProcess {
 public:
  ServerProcess(const std::string& address, const KeepOptions& keep) {
    require(::pipe(starts_.data()) == 0, "a pipe");
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it dies with the test, however the test ends
    char word = 0;
    ::close(starts_[1]);
    if (::read(starts_[0], &word, 1) != 1) ::_exit(0);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
    const auto server = ParameterServer::start(address, kSecret, keep);
    if (!server.ok()) ::_exit(1);
    for (;;) ::pause();
  }
  ~ServerProcess() {
    kill();
    for (const int end : starts_) ::close(end);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  void start() const { require(::write(starts_[1], "s", 1) == 1, "a server that waits"); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  std::array<int, 2> starts_{};
  pid_t pid_ = 0;
};

/// One shard with the rule sgd at a server: a push of ones subtracts 1 from its values. So its values show how many
/// pushes were applied.
class CountedShard {
 public:
  static constexpr std::int64_t kElements = 256;

  explicit CountedShard(const std::string& address)
      : strategy_(served([](Strategy& s) {
          s.optimizer = {.type = OptimizerType::kSgd, .lr = 1, .weight_decay = 0, .momentum = 0};
        })),
        gradients_(kElements, 1.0F),
        values_(kElements),
        courier_({.address = address,
                  .name = "server 0",
                  .secret = kSecret,
                  .definition = std::string(32, 'r') + definition().dump(),
                  .life = 7,
                  .limit = std::chrono::seconds(60)}) {}

  absl::Status join() {
    const auto deadline = ServerLink::Clock::now() + std::chrono::seconds(30);
    return courier_.start(deadline, deadline).status();
  }
  /// Sets the shard's values at the server to zeros.
  absl::Status write() {
    ServerQuestion question;
    question.head.kind = MessageKind::kWrite;
    question.head.second = kElements;
    question.rest.push_back(std::as_bytes(std::span(values_)));
    return wait(courier_.send(std::move(question)));
  }
  ServerCourier::Ticket push(bool is_early = false) {
    if (is_early) {
      ServerQuestion gradients;
      gradients.head.kind = MessageKind::kStage;
      gradients.rest.push_back(std::as_bytes(std::span(gradients_)));
      courier_.send(std::move(gradients));
    }
    const LearningRates rates(strategy_.optimizer);
    const UpdateOptions options(strategy_.optimizer);
    const PushedNumbers numbers{1, 0, 1, 0};
    const std::array<char, 1> used{1};
    ServerQuestion question;
    question.head.kind = is_early ? MessageKind::kApply : MessageKind::kPush;
    question.head.second = ++step_;
    for (const auto& part : {bytes_of(numbers), std::as_bytes(rates.all()), std::as_bytes(options.all()),
                             std::span<const std::byte>(std::as_bytes(std::span(used)))})
      question.front.insert(question.front.end(), part.begin(), part.end());
    if (!is_early) question.rest.push_back(std::as_bytes(std::span(gradients_)));
    return courier_.send(std::move(question));
  }
  absl::Status wait(const ServerCourier::Ticket& ticket) {
    courier_.wait(ticket);
    return ticket->status;
  }
  /// Returns how often all elements were pushed to; -1 if they differ. REQUIRES: no push is under way.
  std::int64_t pushes() {
    courier_.forget_staged();
    ServerQuestion question;
    question.head.kind = MessageKind::kCopy;
    question.answer.push_back(std::as_writable_bytes(std::span(values_)));
    throw_if_error(wait(courier_.send(std::move(question))));
    const bool are_alike = std::ranges::all_of(values_, [&](float each) { return each == values_[0]; });
    return are_alike ? static_cast<std::int64_t>(-values_[0]) : -1;
  }
  std::int64_t lost() const { return courier_.lost_pushes(); }

 private:
  nlohmann::json definition() const {
    const nlohmann::json group = {{"unit", "a unit"}, {"unit_index", 0},
                                  {"group", 0},       {"numels", nlohmann::json::array({kElements})},
                                  {"parts", 1},       {"options", nlohmann::json::array({-1})}};
    return {{"ranks", 1},
            {"server", 0},
            {"servers", 1},
            {"timeout_s", 30.0},
            {"strategy", strategy_.to_json()},
            {"groups", nlohmann::json::array({group})}};
  }

  const Strategy strategy_;
  const std::vector<float> gradients_;
  std::vector<float> values_;
  std::int64_t step_ = 0;
  ServerCourier courier_;
};

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
  for (int i = 0; i < 1000 && server->is_idle(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(server->is_idle());
  EXPECT_EQ(shard.pushes(), 0);
}

TEST(Servers, RankAloneKeepsItsBitsAndOthersTheirStepsWhenAServerIsKilledAmidThem) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const TestFolder folder;
    const std::string address = "127.0.0.1:" + std::to_string(free_port());
    const int port = free_port();
    const KeepOptions keep{folder.path(), /*lose=*/0};
    ServerProcess first(address, keep), second(address, keep);
    first.start();
    setenv("TESSERA_SERVERS", address.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
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
    for (int rank = 0; rank < ranks; ++rank) {
      const RankEnd end = processes.wait(rank);
      EXPECT_EQ(end.signal, 0);
      EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
    }
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
}

TEST(Servers, RoundsKeepTheirBitsWhenAServerIsKilledAmidThem) {
  constexpr int kHere = 2;
  const TestFolder folder;
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  const int port = free_port();
  const KeepOptions keep{folder.path(), /*lose=*/0};
  ServerProcess first(address, keep), second(address, keep);
  first.start();
  setenv("TESSERA_SERVERS", address.c_str(), 1);
  setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
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
  for (int rank = 0; rank < kHere; ++rank) {
    const RankEnd end = processes.wait(rank);
    EXPECT_EQ(end.signal, 0);
    EXPECT_EQ(end.exit_code, ExitCode::kOk) << end.message;
  }
  unsetenv("TESSERA_SERVERS");
  unsetenv("TESSERA_SERVERS_SECRET");
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

TEST(Servers, DamagedFileOfAShardIsRefusedAndOneOfAnotherRunIsNot) {
  const TestFolder folder;
  const KeepOptions keep{folder.path(), 0};
  const std::vector<std::byte> numbers(100, std::byte{7});
  {
    const auto kept = value_or_throw(KeptShards::open(keep, 0, "a run"));
    std::vector<std::byte> image(KeptShards::kHeadBytes);
    image.insert(image.end(), numbers.begin(), numbers.end());
    require(kept->write(3, image).ok(), "a file");
    EXPECT_EQ(value_or_throw(kept->read(3)), image);
    EXPECT_TRUE(value_or_throw(kept->read(4)).empty()) << "nothing was written";
  }
  std::ofstream(folder / "server-0/shard-3.tmp-1-0") << "a server was killed here";
  EXPECT_TRUE(value_or_throw(value_or_throw(KeptShards::open(keep, 0, "another run"))->read(3)).empty());
  EXPECT_FALSE(std::filesystem::exists(folder / "server-0/shard-3.tmp-1-0"));
  std::fstream(folder / "server-0/shard-3", std::ios::in | std::ios::out | std::ios::binary).seekp(100).put('x');
  const auto kept = value_or_throw(KeptShards::open(keep, 0, "a run"));
  EXPECT_EQ(exit_code_of(kept->read(3).status()), ExitCode::kCorruptData);
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

TEST(Servers, WrongSecretAndStrangeBytesAreRefusedAndTheServerGoesOn) {
  const Servers servers(1);
  const auto in = [](int seconds) { return ServerLink::Clock::now() + std::chrono::seconds(seconds); };
  const std::vector<std::byte> zeros(4096);
  MessageHead push;
  push.kind = MessageKind::kPush;
  for (const std::vector<std::byte>& bytes :
       {zeros, std::vector<std::byte>(bytes_of(push).begin(), bytes_of(push).end())}) {
    const auto link = value_or_throw(ServerLink::connect(servers.address(0), in(10)));
    ASSERT_TRUE(link->send(bytes, std::chrono::seconds(10)).ok());
    EXPECT_FALSE(link->receive_head(std::chrono::seconds(10)).ok()) << "it answers no stranger";
  }
  setenv("TESSERA_SERVERS_SECRET", "another secret of some length", 1);
  EXPECT_THAT(error_of([] { run(served(sgd), 1); }), HasSubstr("the secret is another one"));
  setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  EXPECT_EQ(run(served(sgd), 1).losses.size(), std::size_t{kRanks});
}

TEST(Servers, RankThatComesBesideManySilentStrangersWaitsAndIsServed) {
  const Servers servers(1);
  const auto deadline = ServerLink::Clock::now() + std::chrono::seconds(10);
  std::vector<std::unique_ptr<ServerLink>> strangers;
  for (int i = 0; i < 70; ++i) strangers.push_back(value_or_throw(ServerLink::connect(servers.address(0), deadline)));
  const auto link = value_or_throw(ServerLink::connect(servers.address(0), deadline));
  const std::string secret = kSecret;
  MessageHead head;
  head.kind = MessageKind::kSecret;
  head.bytes = static_cast<std::int64_t>(secret.size());
  ASSERT_TRUE(link->send(head, std::as_bytes(std::span(secret)), std::chrono::seconds(10)).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the server has looked at all connections meanwhile
  strangers.clear();
  EXPECT_EQ(value_or_throw(link->receive_head(std::chrono::seconds(10))).kind, MessageKind::kDone);
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

TEST(Servers, MissingServersAndBadAddressesAreNamed) {
  unsetenv("TESSERA_SERVERS");
  EXPECT_THAT(error_of([] { run(served(), 1); }), HasSubstr("needs the variable TESSERA_SERVERS"));
  setenv("TESSERA_SERVERS", "nowhere", 1);
  setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  EXPECT_THAT(error_of([] { run(served(), 1); }), HasSubstr("is no address of a parameter server"));
  unsetenv("TESSERA_SERVERS");
  unsetenv("TESSERA_SERVERS_SECRET");
  EXPECT_THAT(message_of(ParameterServer::start("127.0.0.1:0", "short").status()), HasSubstr("the secret of a job"));
  EXPECT_THAT(message_of(ParameterServer::start("127.0.0.1:x", kSecret).status()), HasSubstr("is no address"));
}

}  // namespace servers_test
}  // namespace tessera::testing
