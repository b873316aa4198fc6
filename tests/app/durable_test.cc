// Tests "durable" in the strategy of `tessera train`: processes die at any moment of a commit or between two commits.
// The run that continues ends with the bits of a run that was not disturbed.

#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "tests/support/limits/long_tests.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace durable_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class DurableSteps : public Workplace {
 protected:
  DurableSteps() { fs::create_directory(path("disk")); }

  /// Returns the command of a run on two ranks with some state on disk. The run commits every `every` steps, or never
  /// if `every` is 0.
  Words run_of(const std::string& steps, int every, const std::string& metrics, const Words& more = {}) const {
    const std::string offload =
        R"(, "offload": {"masters": {"tier": "nvme", "fraction": 0.5}, "moments": {"tier": "nvme",
        "fraction": 0.75}, "paths": [")" +
        path("disk") + R"("], "record": "8KiB", "queue_depth": 2})";
    const std::string durable =
        R"(, "durable": {"every": )" + std::to_string(every) + R"(, "dir": ")" + path("durable") + R"("})";
    return launch(2) + train(strategy("FULL_SHARD", every > 0 ? offload + durable : offload), metrics,
                             Words{"--steps", steps} + more);
  }
  /// Trains for `steps` steps without commits. The checkpoint of this run is in `whole`.
  void run_whole(const std::string& steps) const {
    run(run_of(steps, 0, "whole.jsonl", {"--checkpoint-dir", path("whole")}), 600);
  }
  /// Lets the run continue to its end, and checks that its state is then the state with which run_whole ended.
  void expect_the_same_end(const std::string& steps, const std::string& what) const {
    const Ended last = run(run_of(steps, 3, "parts.jsonl", {"--checkpoint-dir", path("parts")}));
    const Ended same = run_program({TESSERA_PROGRAM, "checkpoint", "diff", path("whole"), path("parts")}, path("look"));
    EXPECT_EQ(same.code, 0) << what << same.out << same.err;
    fs::remove_all(path("parts"));
  }
  void wait_for_step(Program& job, int step) const {
    wait_for(job, path("parts.jsonl"), "\"step\":" + std::to_string(step) + ",");
    ASSERT_TRUE(job.wait_for_rank(1)) << job.out() << job.err();  // the run before this one may have written that step
  }
  void kill_all(Program& job) const {
    const std::vector<pid_t> processes = job.descendants();
    for (const pid_t pid : processes) kill(pid, SIGKILL);
  }
};

TEST_F(DurableSteps, KilledRunResumesFromItsLastCommit) {
  run_whole("60");
  // Commits are so slow that no run ends before it is killed.
  const std::string slow = "rename path=durable every=1 delay=" + std::to_string(patient(60ms).count());
  for (const int at : {5, 21}) {
    Program job(run_of("60", 3, "parts.jsonl"), path("job"), {{"TESSERA_TEST_FAULTS", slow}});
    wait_for_step(job, at);
    kill_all(job);
    EXPECT_EQ(job.wait(20).code, 137);
  }
  const Ended last = run(run_of("60", 3, "parts.jsonl", {"--checkpoint-dir", path("parts")}));
  std::string commits = "15|18";  // a commit is written while later steps run
  for (int step = 21; step <= 60; step += 3) commits += "|" + std::to_string(step);
  EXPECT_THAT(last.out, AllOf(::testing::ContainsRegex("resumes .*durable after step (" + commits + ") "),
                              HasSubstr("checkpoint after step 60")));
  expect_the_same_end("60", "");
}

// The same command replaces the metrics of the run that was killed, from the first step on.
TEST_F(DurableSteps, RunKilledBeforeItsFirstCommitStartsAgain) {
  run_whole("6");
  Program job(run_of("1000", 900, "parts.jsonl"), path("job"));
  wait_for_step(job, 2);
  kill_all(job);
  EXPECT_EQ(job.wait(20).code, 137);
  expect_the_same_end("6", "");
  EXPECT_THAT(read_file(path("parts.jsonl")),
              ::testing::ContainsRegex("\"step\":2,(.|\n)*\"step\":1,(.|\n)*\"step\":6,"));
}

class DurableStepsDying : public DurableSteps, public ::testing::WithParamInterface<const char*> {};

// A run resumes after step 2. One rank dies, or both ranks die, at the n-th file operation of one kind on the files of
// commits, while the run resumes or in a commit. The next run resumes, and ends with the bits of a run that was not
// disturbed.
TEST_P(DurableStepsDying, DeathAtAnyOperationLosesNoCommit) {
  const std::string site = GetParam();
  if (!tests_are_long() && site != "write" && site != "rename") GTEST_SKIP() << "with TESSERA_LONG_TESTS";
  run_whole("6");
  run(run_of("2", 1, "parts.jsonl"));
  fs::copy(path("durable"), path("durable-then"), fs::copy_options::recursive);
  fs::copy(path("disk"), path("disk-then"), fs::copy_options::recursive);
  int died = 0;
  const int step = tests_are_long() ? 1 : 7;
  for (int n = 1; tests_are_long() || n <= 8; n += step) {
    for (const char* name : {"durable", "disk"}) {
      fs::remove_all(path(name));
      fs::copy(path(name + std::string("-then")), path(name), fs::copy_options::recursive);
    }
    const std::string rule =
        site + (n % 2 == 0 ? " path=rank-00001 nth=" : " path=durable nth=") + std::to_string(n) + " crash";
    const Ended ended = run_program(run_of("5", 1, "parts.jsonl"), path("run"), 60, {{"TESSERA_TEST_FAULTS", rule}});
    EXPECT_TRUE(ended.code == 0 || ended.code == 137) << rule << ended.err;
    if (ended.code == 0 && n % 2 == 1) break;
    ++died;
    expect_the_same_end("6", rule);
  }
  EXPECT_GT(died, 0);
  RecordProperty("operations", died);
}

// "unlink" is not among the operations, since a commit removes nothing.
INSTANTIATE_TEST_SUITE_P(Each, DurableStepsDying, ::testing::Values("open", "write", "fsync", "rename", "read"),
                         [](const auto& info) { return std::string(info.param); });

// If TESSERA_SOAK_SEED has the seed of an earlier run, the test makes the same random choices again: the time before
// each kill, the ranks that are killed, and the number of steps between commits.
TEST_F(DurableSteps, RandomKillsChangeNoBits) {
  const char* const given = std::getenv("TESSERA_SOAK_SEED");
  const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  SCOPED_TRACE("TESSERA_SOAK_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const int kills = tests_are_long() ? 200 : 1;
  const std::string steps = tests_are_long() ? "2000" : "150", all_steps = std::to_string(std::stoi(steps) + 3);
  run_whole(all_steps);
  for (int killed = 0; killed < kills; ++killed) {
    Program job(run_of(steps, 1 + up_to(4), "parts.jsonl"), path("job"));
    ASSERT_TRUE(job.wait_for_rank(1)) << job.out() << job.err();  // a kill before the ranks start would hit no rank
    std::this_thread::sleep_for(std::chrono::milliseconds(up_to(2500)));
    const pid_t one = up_to(2) > 0 ? job.rank_pid(up_to(1)) : -1;
    if (one > 0) {
      kill(one, SIGKILL);
    } else {
      kill_all(job);
    }
    const Ended ended = job.wait(30);
    EXPECT_TRUE(ended.code == 0 || ended.code == 137) << ended.err;
    if (ended.code == 0) break;  // this run had ended before the kill
  }
  expect_the_same_end(all_steps, "");
}

TEST_F(DurableSteps, LastCommitIsAwaitedAndItsFailureReported) {
  const Ended ended = run_program(run_of("2", 1, "parts.jsonl"), path("run"), 60,
                                  {{"TESSERA_TEST_FAULTS", "rename path=rank-00001.commit nth=3 errno=ENOSPC"}});
  EXPECT_EQ(ended.code, 74) << ended.err;
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("the commit of step 2 was not made"), HasSubstr("rank 1"), HasSubstr("errno 28")));
}

// A run that ends, or gets a signal, saves a checkpoint. This checkpoint is later than the last commit.
TEST_F(DurableSteps, CheckpointLaterThanTheCommitIsResumed) {
  run_whole("7");
  run(run_of("5", 3, "parts.jsonl", {"--checkpoint-dir", path("parts")}));
  const Ended last = run(run_of("7", 3, "parts.jsonl", {"--checkpoint-dir", path("parts")}));
  EXPECT_THAT(last.out, HasSubstr("step-000000000005 after step 5"));
  const Ended same = run_program({TESSERA_PROGRAM, "checkpoint", "diff", path("whole"), path("parts")}, path("look"));
  EXPECT_EQ(same.code, 0) << same.out << same.err;
}

// The commit holds the least loss, and the loss of each new checkpoint is compared with it. A run that continues from a
// commit, and only gets worse, therefore saves no best checkpoint.
TEST_F(DurableSteps, BestLossIsRestoredFromACommit) {
  write_file(path("held_out"), read_file(path("text")).substr(0, 2000));
  const auto run_to = [&](const char* rate, const char* steps) {
    write_file(path("rate.json"),
               std::string(R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": )") +
                   rate + R"(}, "durable": {"every": 1, "dir": ")" + path("durable") + "\"}}");
    run(launch(2) + train(path("rate.json"), "best.jsonl",
                          {"--steps", steps, "--checkpoint-dir", path("parts"), "--eval-data", path("held_out"),
                           "--eval-every", "1", "--keep-best"}));
  };
  run_to("0.01", "3");
  EXPECT_EQ(read_file(path("parts/best")), "step-000000000003\n");
  fs::remove_all(path("parts"));
  run_to("1.0", "6");
  EXPECT_EQ(read_file(path("parts/latest")), "step-000000000006\n");
  EXPECT_FALSE(fs::exists(path("parts/best")));
}

/// Runs of eight microbatches a step, whose numbers of ranks change.
class DurableRanks : public DurableSteps {
 protected:
  std::string file_of(const std::string& name, const std::string& more) const {
    write_file(path(name), R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": 0.01},
                               "reproducible": true, "gradient_sync": "last_microbatch")" +
                               more + "}");
    return path(name);
  }
  std::string committing() const {
    return file_of("durable.json", R"(, "durable": {"every": 1, "dir": ")" + path("commits") +
                                       R"("}, "offload": {"moments": {"tier": "nvme"}, "paths": [")" + path("disk") +
                                       R"("], "record": "8KiB"})");
  }
  Words run_of_eight(const std::string& file, const std::string& steps, const Words& more = {}) const {
    return train(file, "parts.jsonl", Words{"--steps", steps, "--batch", "1", "--global-batch", "8"} + more);
  }
  Ended start(int ranks, const Words& command, const std::map<std::string, std::string>& variables = {}) const {
    const Words words = Words{"env", "OMP_NUM_THREADS=1"} + launch(ranks) + command;
    const Ended ended = run_program(words, path("run"), 120, variables);
    fs::remove(path("parts.jsonl"));
    return ended;
  }
  void expect_bits_of(const std::string& whole) const {
    const Ended same = run_program({TESSERA_PROGRAM, "checkpoint", "diff", path(whole), path("made")}, path("look"));
    EXPECT_EQ(same.code, 0) << same.out << same.err;
  }
};

// Two ranks commit. Then one rank continues the run, then four ranks, then two ranks again.
TEST_F(DurableRanks, CommitsGoOnWithOtherRanksToTheSameBits) {
  start(1, run_of_eight(file_of("plain.json", ""), "5", {"--checkpoint-dir", path("whole")}));
  const std::string file = committing();
  ASSERT_EQ(start(2, run_of_eight(file, "2")).code, 0);
  const Ended alone = start(1, run_of_eight(file, "3"));
  ASSERT_EQ(alone.code, 0) << alone.err;
  EXPECT_THAT(alone.out, HasSubstr("/moved-commits/step-000000000002 after step 2"));
  EXPECT_FALSE(fs::exists(path("commits/moved-commits"))) << "the new rank has committed";
  EXPECT_FALSE(fs::exists(path("commits/rank-00001.commit-0")));
  for (const auto& entry : fs::directory_iterator(path("disk")))
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("-rank-1.")));
  const Ended four = start(4, run_of_eight(file, "4"));
  ASSERT_EQ(four.code, 0) << four.err;
  EXPECT_THAT(four.out, HasSubstr("after step 3"));
  const Ended two = start(2, run_of_eight(file, "5", {"--checkpoint-dir", path("made")}));
  ASSERT_EQ(two.code, 0) << two.err;
  expect_bits_of("whole");
}

// A process dies while the checkpoint of the commits is made, while the commits are removed, and before the new ranks
// have committed. The next run has another number of ranks.
TEST_F(DurableRanks, DeathWhileCommitsAreMovedLosesNoStep) {
  start(1, run_of_eight(file_of("plain.json", ""), "4", {"--checkpoint-dir", path("whole")}));
  const std::string file = committing();
  ASSERT_EQ(start(2, run_of_eight(file, "2")).code, 0);
  fs::copy(path("commits"), path("commits-then"), fs::copy_options::recursive);
  fs::copy(path("disk"), path("disk-then"), fs::copy_options::recursive);
  std::vector<const char*> rules = {"rename path=moved nth=1 crash", "unlink path=commits/rank-0000 nth=3 crash"};
  if (tests_are_long())
    rules.insert(rules.end(), {"unlink path=commits/rank-0000 nth=1 crash", "unlink path=commits/rank-0000 nth=6 crash",
                               "rename path=moved nth=3 crash", "rename path=.commit- nth=1 crash",
                               "rename path=.commit- nth=2 crash"});
  for (const char* rule : rules) {
    for (const char* name : {"commits", "disk"}) {
      fs::remove_all(path(name));
      fs::copy(path(name + std::string("-then")), path(name), fs::copy_options::recursive);
    }
    fs::remove_all(path("made"));
    EXPECT_NE(start(1, run_of_eight(file, "3"), {{"TESSERA_TEST_FAULTS", rule}}).code, 0) << rule;
    const Ended after = start(4, run_of_eight(file, "4", {"--checkpoint-dir", path("made")}));
    EXPECT_EQ(after.code, 0) << rule << after.err;
    EXPECT_THAT(after.out, HasSubstr("after step 2")) << rule;
    expect_bits_of("whole");
  }
}

// TESSERA_SOAK_SEED makes the test use the same moments and ranks again.
TEST_F(DurableRanks, KillsWithRanksDrawnAnewChangeNoBits) {
  const char* const given = std::getenv("TESSERA_SOAK_SEED");
  const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  SCOPED_TRACE("TESSERA_SOAK_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const int kills = tests_are_long() ? 50 : 1;
  const std::string steps = tests_are_long() ? "800" : "60", all_steps = std::to_string(std::stoi(steps) + 2);
  start(1, run_of_eight(file_of("plain.json", ""), all_steps, {"--checkpoint-dir", path("whole")}));
  const std::string file = committing();
  for (int killed = 0; killed < kills; ++killed) {
    const Words words = Words{"env", "OMP_NUM_THREADS=1"} + launch(1 << up_to(2)) + run_of_eight(file, steps);
    Program job(words, path("job"));
    ASSERT_TRUE(job.wait_for_rank(0)) << job.out() << job.err();
    std::this_thread::sleep_for(std::chrono::milliseconds(up_to(3000)));
    kill_all(job);
    const Ended ended = job.wait(30);
    EXPECT_TRUE(ended.code == 0 || ended.code == 137) << ended.err;
    fs::remove(path("parts.jsonl"));
    if (ended.code == 0) break;  // this run had ended before the kill
  }
  const Ended last = start(4, run_of_eight(file, all_steps, {"--checkpoint-dir", path("made")}));
  EXPECT_EQ(last.code, 0) << last.err;
  expect_bits_of("whole");
}

TEST_F(DurableRanks, CommitsThatCannotGoOnWithOtherRanksAreNamed) {
  const std::string file = committing();
  ASSERT_EQ(start(2, run_of_eight(file, "2")).code, 0);
  std::string other = read_file(file);
  other.replace(other.find("\"reproducible\": true"), 20, "\"reproducible\": false");
  write_file(path("other.json"), other);
  const Ended plain = start(1, run_of_eight(path("other.json"), "3"));
  EXPECT_EQ(plain.code, 65);
  EXPECT_THAT(plain.err, AllOf(HasSubstr("holds step 2 of a run of 2 ranks"), HasSubstr("from-commits")));
  for (const char* name : {"rank-00001.commit-0", "rank-00001.commit-1"}) fs::remove(path("commits") + "/" + name);
  const Ended lost = start(1, run_of_eight(file, "3"));
  EXPECT_EQ(lost.code, 66);
  EXPECT_THAT(lost.err,
              AllOf(HasSubstr("holds commits of 2 ranks, and rank 0's host has those of 1"), HasSubstr("rank-*")));
}

// The commits of two ranks become a checkpoint. The ranks are on one host, or on two hosts. One rank then continues
// from the checkpoint, or four ranks do.
TEST_F(DurableRanks, CheckpointOfCommitsGoesOnWithOtherRanksToTheSameBits) {
  const std::string plain = file_of("plain.json", "");
  start(1, run_of_eight(plain, "4", {"--checkpoint-dir", path("whole")}));
  for (const auto& [hosts, ranks] : {std::pair("1", 1), {"2", 4}}) {
    const std::string commits = path(std::string("commits") + hosts);
    const std::string durable = file_of("durable.json", R"(, "durable": {"every": 1, "dir": ")" + commits + "\"}");
    run(Words{"env", "OMP_NUM_THREADS=1"} + launch(2, {"--pretend-hosts", hosts}) + run_of_eight(durable, "2"));
    fs::remove(path("parts.jsonl"));
    fs::remove_all(path("made"));
    const std::string commit = read_file(commits + "/rank-00001.commit-0");
    const Words from_commits = {TESSERA_PROGRAM, "checkpoint", "from-commits", commits, "--to", path("made")};
    // each commit says on which hosts its ranks were
    const Ended ended = run(from_commits + Words{"--"} + run_of_eight(durable, "2"));
    EXPECT_THAT(ended.out, AllOf(HasSubstr(" after step 2"), HasSubstr("checkpoint after step 2: ")));
    EXPECT_FALSE(fs::exists(path("parts.jsonl"))) << "no step is made";
    EXPECT_EQ(read_file(commits + "/rank-00001.commit-0"), commit) << "the commits stay";
    const Ended refused =
        run_program(from_commits + Words{"--hosts", "3", "--"} + run_of_eight(durable, "2"), path("run"));
    EXPECT_EQ(refused.code, 64) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr("--hosts 3 does not divide the 2 ranks"));
    start(ranks, run_of_eight(plain, "4", {"--checkpoint-dir", path("made")}));
    expect_bits_of("whole");
  }
}

TEST_F(DurableSteps, CommitsOfWhichNoCheckpointCanBeMadeAreNamed) {
  const auto refused = [&](const Words& words, int code, const std::string& wanted) {
    const Words command =
        Words{TESSERA_PROGRAM, "checkpoint", "from-commits", path("none"), "--to", path("made")} + words;
    const Ended ended = run_program(command, path("run"));
    EXPECT_EQ(ended.code, code) << ended.out << ended.err;
    EXPECT_THAT(ended.err, AllOf(HasSubstr(wanted), HasSubstr("hint:")));
  };
  refused({}, 64, "nothing says how the run was started");
  const std::string durable = R"(, "durable": {"every": 1, "dir": ")" + path("none") + "\"}";
  refused(Words{"--"} + train(strategy("FULL_SHARD", durable), "m.jsonl"), 66, path("none") + " holds no commits");
  refused(Words{"--"} + train(strategy("FULL_SHARD"), "m.jsonl"), 78, "has no \"durable\"");
  EXPECT_FALSE(fs::exists(path("none")));
}

TEST_F(DurableSteps, MissingFolderAndUnwantedResumeAreNamed) {
  const Ended no_dir =
      run_program(train(strategy("FULL_SHARD", R"(, "durable": {"every": 1})"), "a.jsonl"), path("run"));
  EXPECT_EQ(no_dir.code, 78);
  EXPECT_THAT(no_dir.err, AllOf(HasSubstr("/durable/every"), HasSubstr("dir")));
  run(run_of("2", 1, "parts.jsonl"));
  const Ended anew = run_program(run_of("4", 1, "b.jsonl", {"--resume", "none"}), path("run"));
  EXPECT_EQ(anew.code, 64) << anew.err;
  EXPECT_THAT(anew.err, AllOf(HasSubstr("holds step 2"), HasSubstr("hint:")));
}

}  // namespace durable_test
}  // namespace tessera::testing
