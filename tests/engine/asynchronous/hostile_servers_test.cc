// Tests what parameter servers do with strangers, with messages that do not fit, and with damaged files.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/asynchronous/servers/kept_shards.h"
#include "engine/asynchronous/servers/served_job.h"
#include "engine/asynchronous/servers/server_courier.h"
#include "engine/asynchronous/servers/server_link.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace servers_test {

using ::testing::HasSubstr;

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
  const std::vector<std::byte> push = first.push_of_zeros();
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

// A server's own folder lies in a folder that a user named, and is swapped for a link while the server runs.
TEST(Servers, LinkInThePlaceOfAServersFolderIsNotFollowed) {
  const TestFolder folder, outside;
  const KeepOptions keep{folder.path(), 0};
  std::ofstream(outside / "shard-3") << "of somebody else";
  std::ofstream(outside / "shard-4.tmp-1-0") << "of somebody else";
  const auto kept = value_or_throw(KeptShards::open(keep, 0, "a run"));
  std::filesystem::rename(folder / "server-0", folder / "away");
  std::filesystem::create_directory_symlink(outside.path(), folder / "server-0");
  std::vector<std::byte> image(KeptShards::kHeadBytes + 100);
  EXPECT_EQ(exit_code_of(kept->write(3, image)), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(kept->read(3).status()), ExitCode::kCorruptData);
  EXPECT_EQ(exit_code_of(KeptShards::open(keep, 0, "a run").status()), ExitCode::kCannotCreate);
  EXPECT_EQ(std::filesystem::file_size(outside / "shard-3"), 16u);
  EXPECT_TRUE(std::filesystem::exists(outside / "shard-4.tmp-1-0"));
  EXPECT_FALSE(std::filesystem::exists(outside / "lock"));
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

TEST(Servers, SilentListenerInAServersPlaceIsNamedInTheTimeOfAStart) {
  const ServerSocket silent = value_or_throw(listen_for_workers("127.0.0.1:0"));
  ServerCourier courier({.address = silent.address,
                         .name = "server 0",
                         .secret = kSecret,
                         .definition = "a run",
                         .limit = std::chrono::hours(1)});
  const auto end = ServerLink::Clock::now() + std::chrono::milliseconds(300);
  const absl::Status status = courier.start(end, end).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(status), HasSubstr("server 0: what listens there does not answer as a parameter server"));
  ::close(silent.socket);
}

TEST(Servers, FoldersThatCannotBeUsedAreErrorsWhenAServerStarts) {
  const TestFolder folder;
  const std::string file = folder.write("file", "no folder"), missing = folder / "missing";
  const auto started = [](const std::optional<KeepOptions>& keep, const std::string& offload) {
    return ParameterServer::start("127.0.0.1:0", kSecret, keep, offload).status();
  };
  EXPECT_THAT(message_of(started(KeepOptions{file + "/state", 16}, "")), HasSubstr(file));
  EXPECT_EQ(exit_code_of(started(std::nullopt, missing)), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(started(std::nullopt, missing)), HasSubstr(missing));
  EXPECT_TRUE(started(KeepOptions{missing, 16}, "").ok()) << "the folder is made";
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

}  // namespace servers_test
}  // namespace tessera::testing
