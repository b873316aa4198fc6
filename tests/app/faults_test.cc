// Tests runs that fail in many ways. Each run ends with its exit code and one message that names the failed rank and
// the reason, and leaves no files or processes behind.

#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace faults_test {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class Faults : public Workplace {
 protected:
  Ended fail(const Words& command, const std::map<std::string, std::string>& environment = {}) const {
    return run_program(command, path("run"), 60, environment);
  }
  /// Returns a command line in which $RANK is the rank.
  static Words by_rank(const Words& command) {
    std::string line = "exec";
    for (const std::string& word : command) line += " \"" + word + "\"";
    return {"/bin/sh", "-c", line};
  }
};

/// Returns whether no rank waited for a timeout. The shortest timeout is 300 s.
bool is_soon(const Ended& ended) { return in_time(ended.seconds, 40); }

// This is fault F45 (docs/faults.md): the machine's GPUs are hidden from the run.
TEST_F(Faults, TrainingWithoutAGpuSaysSoAtOnce) {
  for (const char* transport : {"nccl", "cuda_host"}) {
    const std::string on_gpu =
        strategy("FULL_SHARD", R"(, "comm": {"transport": ")" + std::string(transport) + R"("})");
    for (const Words& start : {Words{}, launch(2)}) {
      const Ended ended = fail(start + train(on_gpu, "none"), {{"CUDA_VISIBLE_DEVICES", ""}});
      EXPECT_EQ(ended.code, 69) << ended.err;
      EXPECT_THAT(ended.err,
                  AllOf(HasSubstr("comm.transport"), ::testing::ContainsRegex("GPU|CUDA"), HasSubstr("hint:")));
      EXPECT_TRUE(is_soon(ended)) << ended.seconds;
    }
  }
}

TEST_F(Faults, BadStrategyFileIsRefusedWithAllErrors) {
  write_file(path("bad.json"), R"({"strategy": "FULL_SHARDS", "optimizer": {"lr": "fast"}})");
  const Ended ended = fail(launch(2) + train(path("bad.json"), "none"));
  EXPECT_EQ(ended.code, 78);
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("/strategy"), HasSubstr("FULL_SHARD"), HasSubstr("/optimizer/lr"), HasSubstr("hint:")));
}

TEST_F(Faults, DifferentStrategiesOnRanksAreNamed) {
  strategy("FULL_SHARD");
  write_file(path("s0.json"), read_file(path("FULL_SHARD.json")));
  write_file(path("s1.json"),
             R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "gradient_accumulation": 2})");
  const Ended ended = fail(launch(2) + by_rank(train(path("s$RANK.json"), "none")));
  EXPECT_EQ(ended.code, 78);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("rank 1/2: /strategy/gradient_clipping"), HasSubstr("started differently")));
  EXPECT_TRUE(is_soon(ended)) << ended.seconds;
}

TEST_F(Faults, DifferentModelsOnRanksAreNamed) {
  write_file(path("m0.json"), read_file(path("model.json")));
  write_file(path("m1.json"),
             R"({"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 3, "width": 64, "heads": 2})");
  const Ended ended =
      fail(launch(2) + by_rank(train(strategy("FULL_SHARD"), "none", {"--model", path("m$RANK.json")})));
  EXPECT_EQ(ended.code, 78) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("rank 1/2: /model/width: 64, rank 0 has 32"));
}

TEST_F(Faults, DataMissingOnOneRankEndsAllAtOnce) {
  write_file(path("text0"), read_file(path("text")));
  const Ended ended = fail(launch(2) + by_rank(train(strategy("FULL_SHARD"), "none", {"--data", path("text$RANK")})));
  EXPECT_EQ(ended.code, 66) << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("could not start: rank 1/2"), HasSubstr("text1")));
  EXPECT_TRUE(is_soon(ended)) << ended.seconds;
}

TEST_F(Faults, TokenOutsideTheVocabularyEndsTheRunAtOnce) {
  write_file(path("model.json"),
             R"({"model": "gpt", "vocab_size": 60, "seq_len": 16, "layers": 1, "width": 32, "heads": 2})");
  const Ended ended = fail(launch(2) + train(strategy("FULL_SHARD"), "none"));
  EXPECT_EQ(ended.code, 65) << ended.err;
  EXPECT_TRUE(is_soon(ended)) << ended.seconds;
}

// This is fault F47 (docs/faults.md). The run's output goes through a pipe, since the limit would also hold for output
// to a file.
TEST_F(Faults, FileSizeLimitIsNamedAndLeavesNothingHalf) {
  for (const char* option : {"--save-weights", "--checkpoint-dir"}) {
    const Words command = train(strategy("FULL_SHARD"), "metrics", {option, path("limited"), "--overwrite"});
    const Ended ended =
        fail(Words{"/bin/bash", "-o", "pipefail", "-c", "(ulimit -f 1; exec \"$@\") 2>&1 | cat", "bash"} + command);
    EXPECT_EQ(ended.code, 74) << option << ended.out;
    EXPECT_THAT(ended.out, AllOf(HasSubstr(path("limited")), HasSubstr("(ulimit -f), which is 1.00 KiB here")));
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path("")))
      EXPECT_THAT(entry.path().string(), ::testing::Not(AnyOf(HasSubstr(".tmp"), HasSubstr(".partial")))) << option;
  }
}

TEST_F(Faults, LastErrorIsWrittenToTheLaunchersErrorFile) {
  const Ended ended = fail(train(path("no-such.json"), "none"), {{"TORCHELASTIC_ERROR_FILE", path("error.json")}});
  EXPECT_NE(ended.code, 0);
  const auto words = nlohmann::json::parse(read_file(path("error.json")), nullptr, false);
  ASSERT_TRUE(words.is_object());
  EXPECT_THAT(words.at("message").at("message").get<std::string>(),
              AllOf(HasSubstr("no-such.json"), HasSubstr("hint: check the path")));
  EXPECT_EQ(words.at("message").at("extraInfo").at("code_of_tessera"), 66);
  EXPECT_TRUE(words.at("message").at("extraInfo").contains("py_callstack"));
  EXPECT_GT(std::stoll(words.at("message").at("extraInfo").at("timestamp").get<std::string>()), 1500000000);
}

TEST_F(Faults, KilledRankEndsAllAndLeavesNothing) {
  const auto shared_before = shared_memory_names();
  Program job(launch(2) + train(strategy("FULL_SHARD"), "killed", {"--steps", "1000000"}), path("run"));
  wait_for(job, path("killed"), "\"step\":20,");
  const pid_t victim = job.rank_pid(1);
  ASSERT_GT(victim, 0);
  const auto family = job.descendants();
  EXPECT_GE(family.size(), 2u);
  ASSERT_EQ(kill(victim, SIGKILL), 0);
  const Ended ended = job.wait(10);
  EXPECT_EQ(ended.code, 128 + SIGKILL) << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("rank 1"), HasSubstr("SIGKILL"), HasSubstr("75")));
  EXPECT_THAT(ended.err, HasSubstr("[rank 0] "));
  for (pid_t pid : family) EXPECT_FALSE(is_alive(pid)) << pid;
  EXPECT_THAT(shared_memory_left(shared_before), ::testing::IsEmpty());
}

}  // namespace faults_test
}  // namespace tessera::testing
