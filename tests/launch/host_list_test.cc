// Tests lists of hosts, frames, and the environment that is sent to other hosts. No process is started.

#include "workshop/launch/hosts/host_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "runtime/base/status.h"
#include "tests/support/limits/patience.h"
#include "workshop/launch/host_job.h"
#include "workshop/launch/hosts/frames.h"
#include "workshop/launch/hosts/job_address.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string write_file(const std::string& text) {
  const std::string path = ::testing::TempDir() + "tessera-hosts-" + std::to_string(::getpid()) + ".txt";
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(HostList, HostsOptionNamesHostsAndSlots) {
  EXPECT_THAT(*parse_hosts("a:2,b:3"), ElementsAre(HostSlots{"a", 2}, HostSlots{"b", 3}));
  EXPECT_THAT(*parse_hosts("me@node-1.example.com,10.0.0.2:1024"),
              ElementsAre(HostSlots{"me@node-1.example.com", 1}, HostSlots{"10.0.0.2", 1024}));
  EXPECT_THAT(*parse_hosts("[fd00::1]:2,[fd00::2]"), ElementsAre(HostSlots{"fd00::1", 2}, HostSlots{"fd00::2", 1}));
  EXPECT_EQ(address_of({"me@a", 1}), "a");
}

TEST(HostList, WrongHostsOptionNamesTheColumn) {
  struct Wrong {
    const char* text;
    const char* said;
  };
  for (const auto& [text, said] :
       {Wrong{"", "column 1: no name"}, Wrong{"a:2,", "column 5: no name"}, Wrong{"a:2,,b", "column 5: no name"},
        Wrong{"a:0", "column 3: the number of slots must be 1 to 1024, got \"0\""}, Wrong{"a:", "column 3: the number"},
        Wrong{"a:2x,b", "got \"2x\""}, Wrong{"b,a:1025", "column 5: the number"}, Wrong{"a:99999999999", "column 3"},
        Wrong{"a,-oProxyCommand=x", "column 3: \"-oProxyCommand=x\" begins with"},
        Wrong{"a b:2", "column 2: \" \" may not"}, Wrong{"a,b;rm", "column 4: \";\" may not"},
        Wrong{"a,b,a:2", "column 5: host \"a\" is named for the second time"},
        Wrong{"fd00::1:2", "column 1: an IPv6 address needs brackets"}, Wrong{"[fd00::1", "column 1: no \"]\""},
        Wrong{"[fd00::1]2", "column 10: only \":\""}}) {
    const auto hosts = parse_hosts(text);
    ASSERT_FALSE(hosts.ok()) << text;
    EXPECT_EQ(exit_code_of(hosts.status()), ExitCode::kUsage) << text;
    EXPECT_THAT(message_of(hosts.status()), AllOf(HasSubstr("--hosts, column "), HasSubstr(said), HasSubstr("hint: ")));
  }
}

TEST(HostList, HostFileHasOneHostALine) {
  const auto hosts = read_hostfile(
      write_file("# two racks\n\na slots=2\n  b:3 # the big one\r\nc\n\td\tslots=4#x\n[fd00::1] slots=5"));
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  EXPECT_THAT(*hosts, ElementsAre(HostSlots{"a", 2}, HostSlots{"b", 3}, HostSlots{"c", 1}, HostSlots{"d", 4},
                                  HostSlots{"fd00::1", 5}));
}

TEST(HostList, WrongHostFileNamesLineAndColumn) {
  struct Wrong {
    const char* text;
    const char* said;
  };
  for (const auto& [text, said] :
       {Wrong{"a\n b slots=x\n", ":2:10: the number of slots must be 1 to 1024, got \"x\""},
        Wrong{"a slots=2 max_slots=4", ":1:11: \"max_slots=4\" says nothing that is known"},
        Wrong{"a slots = 2", ":1:3: \"slots\" says nothing"},
        Wrong{"a:2 slots=2", ":1:5: the slots of this host are given twice"},
        Wrong{"a slots=1 slots=1", ":1:11: the slots"}, Wrong{"\n\na:1\na", ":4:1: host \"a\" is named"},
        Wrong{"a,b", ":1:2: \",\" may not"}, Wrong{"# nothing\n", "names no host"}, Wrong{"", "names no host"}}) {
    const auto hosts = read_hostfile(write_file(text));
    ASSERT_FALSE(hosts.ok()) << text;
    EXPECT_EQ(exit_code_of(hosts.status()), ExitCode::kConfig) << text;
    EXPECT_THAT(message_of(hosts.status()), AllOf(HasSubstr(".txt"), HasSubstr(said), HasSubstr("hint: "))) << text;
  }
  EXPECT_EQ(exit_code_of(read_hostfile("/no/such/file").status()), ExitCode::kNoInput);
  EXPECT_THAT(message_of(read_hostfile("/no/such/file").status()), HasSubstr("/no/such/file"));
  for (const char* path : {"/", "/dev/zero"}) {
    EXPECT_EQ(exit_code_of(read_hostfile(path).status()), ExitCode::kCorruptData) << path;
    EXPECT_THAT(message_of(read_hostfile(path).status()), HasSubstr("want a regular file")) << path;
  }
  const absl::Status large = read_hostfile(write_file(std::string((1 << 20) + 1, '\n'))).status();
  EXPECT_THAT(message_of(large), HasSubstr("this is not a host file"));
}

TEST(JobAddress, FirstHostIsThisMachine) {
  for (const char* name : {"localhost", "127.0.0.1", "me@127.0.0.1", "127.0.0.7"})
    EXPECT_TRUE(check_first_host({name, 1}).ok()) << name;
  const absl::Status other = check_first_host({"192.0.2.1", 1});  // an address of no machine (RFC 5737)
  EXPECT_EQ(exit_code_of(other), ExitCode::kUsage);
  EXPECT_THAT(message_of(other), AllOf(HasSubstr("192.0.2.1"), HasSubstr("is not this machine"), HasSubstr("hint: ")));
}

TEST(JobAddress, LoopbackServesOnlyHostsThatAreThisMachine) {
  EXPECT_EQ(*job_address({{"127.0.0.1", 1}, {"127.0.0.2", 1}}), "127.0.0.1");
  const auto unknown = job_address({{"localhost", 1}, {"no-such-host.invalid", 1}});
  ASSERT_FALSE(unknown.ok());
  EXPECT_THAT(message_of(unknown.status()), AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("--address")));
}

TEST(Frames, AnyBytesArriveWholeHoweverTheyAreCut) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  const std::string stream = encode({FrameType::kOutput, 70000, all}) + encode({FrameType::kGone, 3, ""}) +
                             encode({FrameType::kErrors, 0, std::string(100'000, 'x')});
  for (const std::size_t step : {std::size_t{1}, std::size_t{7}, stream.size()}) {
    FrameReader reader;
    std::vector<Frame> frames;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      reader.add(std::string_view(stream).substr(at, step));
      while (auto frame = reader.next()) frames.push_back(*std::move(frame));
    }
    ASSERT_EQ(frames.size(), 3u);
    EXPECT_EQ(frames[0].rank, 70000);
    EXPECT_EQ(frames[0].body, all);
    EXPECT_EQ(frames[1].type, FrameType::kGone);
    EXPECT_EQ(frames[2].body.size(), 100'000u);
    EXPECT_FALSE(reader.is_broken());
  }
}

TEST(Frames, TextThatIsNoFrameIsNoticed) {
  FrameReader reader;
  reader.add("Welcome to node7! You have mail.\n");
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(reader.is_broken());
}

TEST(HostJob, JobArrivesAsItWasSent) {
  HostJob job;
  job.options.command = {"./a b", "", "'\"$x\n\\", "\xff"};
  job.options.ranks = 6;
  job.options.pretended_hosts = {1, 3, 2};
  job.options.max_restarts = 2;
  job.options.switches.plan = true;
  job.options.times.silence_s = 2.5;
  job.job.address = "10.0.0.1";
  job.job.port = 4321;
  job.job.restarts = 1;
  job.job.run_id = "7-4321";
  job.first_rank = 4;
  job.ranks = 2;
  job.directory = "/a b";
  job.environment = {"A=b=c", "B=\n"};
  const auto got = decode_job(encode(job));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->options.command, job.options.command);
  EXPECT_EQ(got->options.times.silence_s, 2.5);
  EXPECT_TRUE(got->options.switches.plan);
  EXPECT_FALSE(got->options.switches.strict);
  EXPECT_EQ(got->directory, job.directory);
  EXPECT_EQ(rank_environment(got->options, got->job, 5, got->environment),
            rank_environment(job.options, job.job, 5, job.environment));
  for (std::size_t length = 0; length < encode(job).size(); ++length)
    EXPECT_FALSE(decode_job(encode(job).substr(0, length))) << length;
}

TEST(HostJob, EndOfARankKeepsItsAgeAndItsLastWords) {
  RankRecord record;
  record.rank = 3;
  record.pid = 77;
  record.exit.wait_status = 65 << 8;
  record.exit.when = std::chrono::system_clock::now() - std::chrono::seconds(5);
  record.exit.peak_resident_bytes = 5 << 20;
  record.exit.memory_limit_bytes = 6 << 20;
  record.message = "loss is nan";
  record.message_time = record.exit.when - std::chrono::seconds(1);
  record.code_of_tessera = 65;
  const auto got = decode_exit(3, encode_exit(record));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->exit.code(), 65);
  EXPECT_EQ(got->pid, 77);
  EXPECT_EQ(got->exit.peak_resident_bytes, 5 << 20);
  EXPECT_EQ(got->exit.memory_limit_bytes, 6 << 20);
  EXPECT_EQ(got->message, record.message);
  EXPECT_EQ(got->code_of_tessera, 65);
  EXPECT_FALSE(got->told_by_peer);
  const std::chrono::duration<double> apart = std::chrono::abs(got->failure_time() - record.failure_time());
  EXPECT_TRUE(in_time(apart.count(), 2)) << apart.count();
}

TEST(HostJob, ListedVariablesGoToOtherHosts) {
  const std::vector<std::string> here = {
      "PATH=/p", "HOME=/h", "OMP_NUM_THREADS=2", "MY_DATA=/d", "RANK=7", "TESSERA_PLAN=table", "LD_PRELOAD=x"};
  EXPECT_THAT(*travelling_environment(here, {}), ElementsAre("PATH=/p", "OMP_NUM_THREADS=2", "TESSERA_PLAN=table"));
  EXPECT_THAT(*travelling_environment(here, {"MY_DATA"}),
              ElementsAre("PATH=/p", "OMP_NUM_THREADS=2", "MY_DATA=/d", "TESSERA_PLAN=table"));
  for (const char* name : {"NOT_THERE", "MY_DATA=/d", ""}) {
    const auto wrong = travelling_environment(here, {name});
    ASSERT_FALSE(wrong.ok()) << name;
    EXPECT_THAT(message_of(wrong.status()), AllOf(HasSubstr("--env"), HasSubstr(name), HasSubstr("hint: ")));
  }
}

}  // namespace
}  // namespace tessera
