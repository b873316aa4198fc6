// Tests runs that are interrupted by the end of their steps, by a signal, or by kill -9. The run that continues ends
// with the same bits. `tessera checkpoint` is tested here, too.

#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "tests/support/limits/long_tests.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace checkpoint_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Checkpoints : public Workplace {
 protected:
  /// Returns the command of a run of `steps` steps on `ranks` ranks that saves to path(`folder`).
  Words run_of(int ranks, const std::string& steps, const std::string& folder, const std::string& metrics,
               const Words& more = {}) const {
    const std::string file = strategy("FULL_SHARD", R"(, "lr_schedule": {"type": "cosine", "total_steps": 200},
                                      "checkpoint": {"async": )" +
                                                        std::string(saves_beside_training_ ? "true}" : "false}"));
    return (ranks > 1 ? launch(ranks) : Words{}) +
           train(file, metrics, Words{"--steps", steps, "--checkpoint-dir", path(folder)} + more);
  }
  Words tool(const Words& words) const { return Words{TESSERA_PROGRAM, "checkpoint"} + words; }
  Ended look(const Words& words, int code = 0) const {
    const Ended ended = run_program(tool(words), path("look"));
    EXPECT_EQ(ended.code, code) << ended.out << ended.err;
    return ended;
  }
  std::string latest(const std::string& folder) const {
    std::string name = read_file(path(folder) + "/latest");
    if (!name.empty()) name.pop_back();
    return path(folder) + "/" + name;
  }
  /// Waits until a save to path("parts") is under way.
  void wait_for_a_save(Program& job) const {
    Deadline limit(std::chrono::seconds(60));
    for (bool saves = false; !saves; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      for (const auto& entry : std::filesystem::directory_iterator(path("parts")))
        saves = saves || entry.path().string().find(".tmp-") != std::string::npos;
      ASSERT_FALSE(limit.passed()) << job.out() << job.err();
    }
  }
  /// Kills one rank, or all processes if `rank` is -1. Returns false if the job had ended before. Otherwise it checks
  /// that the kill ended the job and that its checkpoints are whole, and returns true.
  bool kill_some(Program& job, int rank) const {
    const std::vector<pid_t> processes = job.descendants();
    const pid_t one = rank < 0 ? -1 : job.rank_pid(rank);
    if (one > 0) {
      kill(one, SIGKILL);
    } else {
      for (const pid_t pid : processes) kill(pid, SIGKILL);
      if (processes.empty()) kill(job.pid(), SIGKILL);  // the job is one rank without a launcher
    }
    const Ended ended = job.wait(30);
    if (ended.code == 0) return false;
    EXPECT_EQ(ended.code, 137) << ended.err;
    if (std::filesystem::exists(path("parts/latest"))) look({"verify", path("parts")});
    return true;
  }
  /// Continues a copy of path("before") to `steps` steps. Each rank dies at its n-th file operation of one kind
  /// (`site`) on the files of checkpoints. Checks that the checkpoints are whole afterwards. Returns false if there
  /// were fewer operations; the run then ended normally.
  bool dies_in_a_save(const std::string& site, int n, const std::string& steps, const Words& more = {}) const {
    std::filesystem::remove_all(path("parts"));
    std::filesystem::copy(path("before"), path("parts"), std::filesystem::copy_options::recursive);
    const std::string rule = site + " path=parts nth=" + std::to_string(n) + " crash";
    const Ended ended =
        run_program(run_of(2, steps, "parts", "died.jsonl", more), path("run"), 60, {{"TESSERA_TEST_FAULTS", rule}});
    const bool died = ended.code != 0;
    EXPECT_EQ(ended.code, died ? 137 : 0) << rule << ended.err;
    EXPECT_TRUE(in_time(ended.seconds, 30)) << rule;
    look({"verify", path("parts")});
    return died;
  }
  /// Returns the command of a run in fp32 whose steps have 12 samples on any number of ranks. The learning rate is low,
  /// because sums on 1, 2 and 3 ranks are added in different orders. A rate ten times as high makes the losses of
  /// 400 steps differ by 20 %. This rate makes them differ by 5e-7.
  Words elastic_run(int ranks, int steps, const std::string& folder, const std::string& metrics,
                    const Words& more = {}) const {
    const std::string file = path("elastic.json");
    write_file(file, R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": 0.001},
                         "gradient_clipping": 1.0})");
    return (ranks > 1 ? launch(ranks) : Words{}) +
           train(file, metrics,
                 Words{"--steps", std::to_string(steps), "--checkpoint-dir", path(folder), "--global-batch", "12"} +
                     more);
  }
  /// Compares the steps' losses of two runs; one of them may have taken some steps twice.
  void expect_same_losses(const std::string& metrics, const std::string& wanted, double tolerance) const {
    std::map<std::int64_t, double> got;
    for (const nlohmann::json& step : steps(metrics)) got[step.at("step")] = step.at("loss");
    const std::vector<nlohmann::json> all = steps(wanted);
    EXPECT_EQ(got.size(), all.size());
    for (const nlohmann::json& step : all) {
      const double loss = step.at("loss");
      EXPECT_NEAR(got[step.at("step")], loss, tolerance * loss) << "step " << step.at("step");
    }
  }
  /// Returns the last line of each step, by number. A run that continues may have made some steps twice.
  std::map<int, std::string> by_step(const std::string& metrics) const {
    std::map<int, std::string> steps;
    for (const std::string& line : losses(metrics)) steps[std::stoi(line)] = line;
    return steps;
  }

  /// Returns the command of a run of `steps` steps. The run's bits do not depend on the number of ranks: a step has 24
  /// microbatches of one sample on any number of ranks.
  Words reproducible_run(int ranks, const std::string& steps, const std::string& folder, const std::string& metrics,
                         const Words& more = {}) const {
    const std::string file = path("reproducible.json");
    write_file(file, R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": 0.01},
                         "gradient_clipping": 1.0, "reproducible": true, "gradient_sync": "last_microbatch"})");
    const Words kept = {"--steps", steps, "--batch", "1", "--global-batch", "24", "--checkpoint-dir", path(folder)};
    return Words{"env", "OMP_NUM_THREADS=1"} + launch(ranks) + train(file, metrics, kept + more);
  }
  /// Makes a run of `steps` steps. `command` returns the run's command line. The function then makes the run again and
  /// kills one rank or all ranks at random moments, `kills` times. The run continues each time, and ends with the bits
  /// of the first run. TESSERA_SOAK_SEED makes a test use the same moments again.
  template <class Command>
  void survive_random_kills(int kills, const std::string& steps, const Command& command) const {
    const char* const given = std::getenv("TESSERA_SOAK_SEED");
    const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
    SCOPED_TRACE("TESSERA_SOAK_SEED=" + std::to_string(seed));
    std::mt19937 random(seed);
    const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
    // A run that made no checkpoint may have left metrics. The next run would not replace them.
    const auto leave_no_metrics = [&] {
      if (!std::filesystem::exists(path("parts/latest"))) std::filesystem::remove(path("parts.jsonl"));
    };
    run(command(up_to, steps, "whole", "whole.jsonl", Words{}), 600);
    for (int killed = 0; killed < kills;) {
      leave_no_metrics();
      const Words saves = {"--every-steps", std::to_string(1 + up_to(9)), "--keep", "2"};
      Program job(command(up_to, steps, "parts", "parts.jsonl", saves), path("job"));
      std::this_thread::sleep_for(std::chrono::milliseconds(200 + up_to(3000)));
      if (kill_some(job, up_to(2) > 0 ? up_to(1) : -1)) {
        ++killed;
      } else {  // this run had ended before the kill
        look({"diff", path("whole"), path("parts")});
        std::filesystem::remove_all(path("parts"));
      }
    }
    leave_no_metrics();
    run(command(up_to, steps, "parts", "parts.jsonl", Words{"--every-steps", "100"}), 600);
    EXPECT_EQ(by_step("parts.jsonl"), by_step("whole.jsonl"));
    look({"diff", path("whole"), path("parts")});
  }

  bool saves_beside_training_ = false;  ///< the value of checkpoint.async in the next run_of
};

/// A group of processes (cgroup version 1) with a limit of memory. The destructor waits until all processes have left
/// the group, and removes the group.
class MemoryGroup {
 public:
  explicit MemoryGroup(std::string folder) : folder_(std::move(folder)) {
    std::error_code error;
    exists_ = std::filesystem::create_directory(folder_, error);
  }
  ~MemoryGroup() {
    std::error_code error;
    for (Deadline limit(std::chrono::seconds(10));
         exists_ && !std::filesystem::remove(folder_, error) && !limit.passed();)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(error) << folder_ << ": " << error.message();
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  bool exists() const { return exists_; }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  /// Returns words to put before a command, so that the command runs in the group. If memory runs out, the kernel kills
  /// processes with a larger score first.
  Words enter(int score) const {
    return {"/bin/sh", "-c",
            "echo $$ > " + file("cgroup.procs") + "; echo " + std::to_string(score) +
                " > /proc/self/oom_score_adj; exec \"$@\"",
            "sh"};
  }
  /// Sets the group's memory limit to its present use plus `bytes`. Returns the limit, or 0 if the kernel does not
  /// accept it.
  std::int64_t leave_room_of(std::int64_t bytes) const {
    for (Deadline deadline(std::chrono::seconds(5)); !deadline.passed();) {
      const std::int64_t limit = number("memory.usage_in_bytes") + bytes;
      write_file(file("memory.limit_in_bytes"), std::to_string(limit));
      if (number("memory.limit_in_bytes") == limit) return limit;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return 0;
  }

 private:
  std::int64_t number(const std::string& name) const { return std::atoll(read_file(file(name)).c_str()); }

  const std::string folder_;
  bool exists_ = false;
};

TEST_F(Checkpoints, ResumedRunGivesTheBitsOfOneRun) {
  for (const int ranks : {1, 2}) {
    const std::string n = std::to_string(ranks);
    run(run_of(ranks, "12", "whole" + n, "whole.jsonl" + n));
    run(run_of(ranks, "5", "parts" + n, "parts.jsonl" + n));
    const Ended second =
        run(run_of(ranks, "12", "parts" + n, "parts.jsonl" + n, {"--every-steps", "2", "--keep", "2"}));
    EXPECT_THAT(second.out, HasSubstr("step-000000000005 after step 5"));
    EXPECT_EQ(by_step("parts.jsonl" + n), by_step("whole.jsonl" + n));
    look({"diff", path("whole" + n), path("parts" + n)});
    const std::string listed = look({"ls", path("parts" + n)}).out;
    EXPECT_THAT(listed, AllOf(HasSubstr("step-000000000010"), HasSubstr("step-000000000012"), HasSubstr("latest"),
                              Not(HasSubstr("step-000000000008"))));
    // This run is complete already, so it makes no more steps.
    EXPECT_THAT(run(run_of(ranks, "12", "parts" + n, "parts.jsonl" + n)).out, HasSubstr("all steps were done before"));
  }
}

// The text has few samples, so some runs continue in the next epoch.
TEST_F(Checkpoints, RunKilledAtAnyMomentResumesWithTheSameBits) {
  const std::string steps = "250";  // there are so many steps that every run below is killed before its end
  run(run_of(2, steps, "whole", "whole.jsonl"));
  ASSERT_GT(by_step("whole.jsonl").size(), 100u);
  int kills = 0;
  for (const int at : {7, 40, 41, 77}) {
    saves_beside_training_ = !saves_beside_training_;
    Program job(run_of(2, steps, "parts", "parts.jsonl", {"--every-steps", "3", "--keep", "2"}), path("job"));
    wait_for(job, path("parts.jsonl"), "\"step\":" + std::to_string(at) + ",");
    ASSERT_TRUE(job.wait_for_rank(1)) << job.out() << job.err();  // the run before this one may have written that step
    for (const pid_t pid : job.descendants()) {
      if (kill(pid, SIGKILL) == 0) ++kills;
    }
    EXPECT_EQ(job.wait(20).code, 137);
    look({"verify", path("parts")});
  }
  EXPECT_GT(kills, 4);
  const Ended last = run(run_of(2, steps, "parts", "parts.jsonl", {"--every-steps", "50"}));
  EXPECT_THAT(last.out, HasSubstr("resumes "));
  EXPECT_EQ(by_step("parts.jsonl"), by_step("whole.jsonl"));
  look({"diff", path("whole"), path("parts")});
  for (const auto& entry : std::filesystem::directory_iterator(path("parts")))
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
}

// This is fault F10 (docs/faults.md).
TEST_F(Checkpoints, RandomKillsChangeNoBits) {
  survive_random_kills(tests_are_long() ? 200 : 2, tests_are_long() ? "3000" : "400",
                       [&](const auto& up_to, const auto&... words) {
                         saves_beside_training_ = up_to(1) == 1;
                         return run_of(2, words...);
                       });
}

TEST_F(Checkpoints, RandomKillsAndNumbersOfRanksChangeNoBits) {
  bool is_first = true;  // the first command makes the run that is not killed
  survive_random_kills(
      tests_are_long() ? 50 : 2, tests_are_long() ? "1000" : "30", [&](const auto& up_to, const auto&... words) {
        constexpr std::array kRanks = {1, 2, 3, 4, 6, 8};
        const int ranks = std::exchange(is_first, false) ? 1 : kRanks[static_cast<std::size_t>(up_to(5))];
        return reproducible_run(ranks, words...);
      });
}

TEST_F(Checkpoints, AnotherProcessorIsRefusedUnlessItIsAllowed) {
  run(reproducible_run(2, "1", "parts", "parts.jsonl"));
  const auto go_on = [&](const std::string& variable, int code, const Words& more = {}) {
    Words command = reproducible_run(1, "2", "parts", "parts.jsonl", more);
    command.insert(command.begin() + 2, variable);  // env takes the last of two values
    const Ended ended = run_program(command, path("run"));
    EXPECT_EQ(ended.code, code) << ended.out << ended.err;
    return ended.err;
  };
  EXPECT_THAT(go_on("OMP_NUM_THREADS=2", 78),
              AllOf(HasSubstr(latest("parts") + ": /reproducible: "), HasSubstr("threads 2, the run before has 1"),
                    HasSubstr("hint: set OMP_NUM_THREADS"), HasSubstr("--allow-other-processor")));
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    EXPECT_THAT(go_on("ATEN_CPU_CAPABILITY=default", 78), HasSubstr("LibTorch's instruction set"));
  }
#endif
  EXPECT_THAT(look({"show", path("parts")}).out, HasSubstr("processor: 1 thread a rank, LibTorch's operators for "));
  EXPECT_THAT(go_on("OMP_NUM_THREADS=2", 0, {"--allow-other-processor"}),
              HasSubstr("threads 2, the run before has 1. Its bits are others from here on"));
  EXPECT_THAT(look({"show", path("parts")}).out, HasSubstr("processor: 2 threads a rank"));
  const Ended plain = run_program(run_of(1, "1", "plain", "plain.jsonl", {"--allow-other-processor"}), path("run"));
  EXPECT_EQ(plain.code, 64) << plain.err;
  EXPECT_THAT(plain.err, HasSubstr("--allow-other-processor is for a strategy with \"reproducible\""));
}

TEST_F(Checkpoints, RanksOfOtherProcessorsAreRefused) {
  Words command = reproducible_run(2, "1", "parts", "parts.jsonl");
  const auto dashes = std::ranges::find(command, "--");
  ASSERT_NE(dashes, command.end());
  const Words by_rank = {"sh", "-c", "OMP_NUM_THREADS=$((RANK + 1)) exec \"$0\" \"$@\""};
  command.insert(dashes + 1, by_rank.begin(), by_rank.end());
  const Ended ended = run_program(command, path("run"));
  EXPECT_EQ(ended.code, 78) << ended.out << ended.err;
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("rank 1: threads 2, rank 0 has 1"), HasSubstr("hint: set one OMP_NUM_THREADS")));
}

// Fault F7 (docs/faults.md): the exit code is 0, or the code that --signal-exit-code gives.
TEST_F(Checkpoints, SignalsEndTheStepSaveAndExitWithZero) {
  const std::string steps = "300";  // there are so many steps that every run below gets its signal before its end
  run(run_of(2, steps, "whole", "whole.jsonl"));
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const std::string folder = "parts" + std::to_string(signal), metrics = folder + ".jsonl";
    const int code = signal == SIGTERM ? 0 : 75;
    Program job(run_of(2, steps, folder, metrics, {"--signal-exit-code", std::to_string(code)}), path("job"));
    wait_for(job, path(metrics), "\"step\":9,");
    // SIGTERM goes to only one rank. SIGUSR1 goes to the launcher, which tells all ranks.
    const pid_t whom = signal == SIGTERM ? job.rank_pid(1) : job.pid();
    ASSERT_GT(whom, 0);
    ASSERT_EQ(kill(whom, signal), 0);
    const Ended ended = job.wait(30);
    EXPECT_EQ(ended.code, code) << ended.out << ended.err;
    EXPECT_THAT(ended.out, AllOf(HasSubstr("training ends after step"), HasSubstr("checkpoint after step")));
    EXPECT_LT(by_step(metrics).size(), 300u);
    run(run_of(2, steps, folder, metrics));
    EXPECT_EQ(by_step(metrics), by_step("whole.jsonl"));
    look({"diff", path("whole"), path(folder)});
  }
}

// Fault F7 (docs/faults.md): the second signal ends a rank at once. Here the second signal arrives during the save that
// the first signal asked for. That save would take many minutes.
TEST_F(Checkpoints, SecondSignalEndsARankAtOnce) {
  run(run_of(2, "4", "parts", "parts.jsonl"));
  // The other rank, whose save does not end either, gets little time (--grace) to end.
  Program job(launch(2, {"--grace", "1"}) + run_of(1, "1000000", "parts", "more.jsonl"), path("job"),
              {{"TESSERA_TEST_FAULTS", "fsync path=parts every=1 delay=600000"}});
  wait_for(job, path("more.jsonl"), "\"step\":9,");
  const pid_t rank = job.rank_pid(1);
  ASSERT_GT(rank, 0);
  ASSERT_EQ(kill(rank, SIGTERM), 0);
  wait_for_a_save(job);
  ASSERT_EQ(kill(rank, SIGTERM), 0);
  const Ended ended = job.wait(30);
  EXPECT_EQ(ended.code, 128 + SIGTERM) << ended.out << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("rank 1"), HasSubstr("SIGTERM")));
  EXPECT_THAT(look({"verify", path("parts")}).out, HasSubstr("step-000000000004"));
}

// Faults F20 and F28 (docs/faults.md): the folder is tested before training. This run must be able to write there, and
// no other run may do so.
TEST_F(Checkpoints, UnusableFolderIsAnErrorBeforeTraining) {
  write_file(path("file"), "x");
  const Ended no_folder = run_program(run_of(2, "3", "file/parts", "none.jsonl"), path("run"));
  EXPECT_EQ(no_folder.code, 73) << no_folder.err;
  EXPECT_THAT(no_folder.err, AllOf(HasSubstr("--checkpoint-dir"), HasSubstr("file/parts"), HasSubstr("hint:")));
  EXPECT_FALSE(std::filesystem::exists(path("none.jsonl")));

  Program first(run_of(2, "1000000", "parts", "first.jsonl"), path("job"));
  wait_for(first, path("first.jsonl"), "\"step\":3,");
  const Ended second = run_program(run_of(2, "3", "parts", "none.jsonl"), path("run"));
  EXPECT_EQ(second.code, 69) << second.err;
  EXPECT_THAT(second.err, AllOf(HasSubstr("another process trains with checkpoints in"),
                                HasSubstr("process " + std::to_string(first.rank_pid(0)) + " on "),
                                HasSubstr("run.lock"), HasSubstr("hint:")));
  EXPECT_FALSE(std::filesystem::exists(path("none.jsonl")));
  kill(first.pid(), SIGTERM);
  EXPECT_EQ(first.wait(30).code, 0) << first.err();
}

// Fault F22 (docs/faults.md): the file system is really full, since it is too small for a second checkpoint.
TEST_F(Checkpoints, FullFileSystemKeepsTheCheckpointBefore) {
  std::filesystem::create_directory(path("small"));
  std::string train;
  for (const std::string& word : run_of(2, "6", "small/parts", "full.jsonl", {"--every-steps", "3"}))
    train += "'" + word + "' ";
  const std::string tool = std::string(TESSERA_PROGRAM) + " checkpoint verify ";
  const Ended ended =
      run_program({"unshare", "-m", "/bin/sh", "-c",
                   "mount -t tmpfs -o size=900k none " + path("small") + " || exit 99; " + train + "; code=$?; " +
                       tool + path("small/parts") + " && ls -a " + path("small/parts") + " && exit $code"},
                  path("run"));
  if (ended.code == 99 || ended.err.find("unshare") != std::string::npos) GTEST_SKIP() << "no right to mount here";
  EXPECT_EQ(ended.code, 74) << ended.out << ended.err;
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("rank "), HasSubstr("small/parts/"), HasSubstr("errno 28"), HasSubstr("hint:")));
  EXPECT_THAT(ended.out, AllOf(HasSubstr("step-000000000003 is whole"), Not(HasSubstr(".tmp-"))));
}

// Fault F27 (docs/faults.md): while a save runs during training, the memory of the ranks' group runs out, and the
// kernel kills one rank. The launcher is in the outer memory group, which contains the ranks' group and has its own
// limit. When memory is short, the kernel kills further processes of a group before the first process's memory is free.
// With a single group, the kernel could kill the launcher too, and the failure would not be reported.
TEST_F(Checkpoints, RankKilledForItsMemoryIsExplained) {
  run(run_of(2, "4", "parts", "parts.jsonl"));
  const MemoryGroup of_job("/sys/fs/cgroup/memory/tessera-test-" + std::to_string(::getpid()));
  const MemoryGroup of_ranks(of_job.file("ranks"));
  if (!of_ranks.exists()) GTEST_SKIP() << "no right to make groups: " << of_ranks.file("");
  saves_beside_training_ = true;
  Program job(of_job.enter(0) + launch(2) + of_ranks.enter(1000) +
                  run_of(1, "1000000", "parts", "more.jsonl", {"--every-steps", "5"}),
              path("job"), {{"TESSERA_TEST_FAULTS", "write path=parts every=1 delay=600000"}});
  wait_for_a_save(job);
  const std::int64_t limit = of_job.leave_room_of(std::int64_t{1} << 30);
  if (limit == 0 || of_ranks.leave_room_of(8 << 20) == 0) GTEST_SKIP() << "no limits for " << of_ranks.file("");
  run_program(of_ranks.enter(0) + Words{"tail", "/dev/zero"}, path("hog"));
  const Ended ended = job.wait(60);
  EXPECT_EQ(ended.code, 137) << ended.out << ended.err;
  char gibibytes[32];
  std::snprintf(gibibytes, sizeof gibibytes, "%.2f GiB", static_cast<double>(limit) / (1 << 30));
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("first cause: rank "), HasSubstr("signal 9 (SIGKILL)"),
                    HasSubstr("out-of-memory killer; its peak was "),
                    HasSubstr("the memory limit of this group " + std::string(gibibytes)), HasSubstr("hint:")))
      << ended.code << read_file(of_ranks.file("memory.oom_control"));
  EXPECT_THAT(look({"verify", path("parts")}).out, HasSubstr("step-000000000004"));
}

// Fault F2 (docs/faults.md): a rank dies at any file operation of a save. The other ranks also end, and the old
// checkpoint or the new checkpoint is whole. The next run ends with the bits of a run that was not disturbed.
TEST_F(Checkpoints, RankThatDiesInASaveLeavesAWholeCheckpoint) {
  run(run_of(2, "2", "before", "before.jsonl"));
  run(run_of(2, "3", "whole", "whole.jsonl"));
  for (const std::string site : {"open", "write", "fsync", "rename", "mkdir"}) {
    int n = 1;
    for (bool died = true; died; ++n) {
      if (!tests_are_long() && n % 3 != 1) continue;
      died = dies_in_a_save(site, n, "3");
    }
    EXPECT_GT(n, 2) << site;
    run(run_of(2, "3", "parts", "died.jsonl"));
    look({"diff", path("whole"), path("parts")});
  }
}

// Fault F3 (docs/faults.md): ranks die at any operation of an asynchronous save, and the checkpoints stay whole. Two
// saves follow each other, and the first one runs at the same time as a step.
TEST_F(Checkpoints, DeathInASaveBesideTrainingLeavesAWholeCheckpoint) {
  run(run_of(2, "2", "before", "before.jsonl"));
  run(run_of(2, "4", "whole", "whole.jsonl"));
  saves_beside_training_ = true;
  for (const auto& [site, some] : {std::pair("open", 4), {"write", 2}, {"fsync", 3}, {"rename", 2}, {"mkdir", 1}}) {
    EXPECT_TRUE(dies_in_a_save(site, some, "4", {"--every-steps", "1"})) << site;
    for (int n = 1; tests_are_long() && dies_in_a_save(site, n, "4", {"--every-steps", "1"}); ++n) continue;
    run(run_of(2, "4", "parts", "died.jsonl", {"--every-steps", "1"}));
    look({"diff", path("whole"), path("parts")});
  }
}

// Fault F3 (docs/faults.md): rank 1 dies at any file operation of a load. Rank 0 ends too, the checkpoint stays as it
// is, and the next run loads it.
TEST_F(Checkpoints, RankThatDiesInALoadLeavesTheCheckpointAsItIs) {
  run(run_of(2, "2", "parts", "parts.jsonl"));
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path("parts")))
      if (entry.is_regular_file() && entry.path().extension() != ".lock") files[entry.path()] = read_file(entry.path());
    return files;
  };
  const auto before = contents();
  for (const auto& [site, some] : {std::pair("read", 3), {"open", 2}}) {
    bool died = true;
    for (int n = tests_are_long() ? 1 : some; died; ++n) {
      const Words dying = {"/bin/sh", "-c",
                           "if [ $RANK = 1 ]; then export TESSERA_TEST_FAULTS=\"" + std::string(site) +
                               " path=parts/step-000000000002/ nth=" + std::to_string(n) + " crash\"; fi; exec \"$@\"",
                           "sh"};
      const Ended ended = run_program(launch(2) + dying + run_of(1, "2", "parts", "died.jsonl"), path("run"));
      died = ended.code != 0;
      EXPECT_EQ(ended.code, died ? 137 : 0) << site << n << ended.err;
      EXPECT_TRUE(in_time(ended.seconds, 30)) << site << n;
      EXPECT_TRUE(contents() == before) << site << n;
      EXPECT_THAT(ended.err, HasSubstr(died ? "rank 1" : "")) << site << n;
      EXPECT_TRUE(died || n > some) << site << n;
      if (!tests_are_long()) break;
    }
  }
  run(run_of(2, "4", "whole", "whole.jsonl"));
  run(run_of(2, "4", "parts", "parts.jsonl"));
  look({"diff", path("whole"), path("parts")});
}

// Faults F1 and F2 (docs/faults.md): a rank dies in a save, twice. The launcher starts all ranks again, and they
// continue from the last whole checkpoint.
TEST_F(Checkpoints, RestartedRanksResumeFromTheLastCheckpoint) {
  run(run_of(2, "9", "whole", "whole.jsonl"));
  const Words dying = {"/bin/sh", "-c",
                       "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then "
                       "export TESSERA_TEST_FAULTS=\"fsync path=parts nth=2 crash\"; fi; exec \"$@\"",
                       "sh"};
  const Words training = run_of(1, "9", "parts", "parts.jsonl", {"--every-steps", "2"});
  const Ended ended = run(launch(2, {"--max-restarts", "2"}) + dying + training, 120);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("restart 1 of 2"), HasSubstr("restart 2 of 2"), HasSubstr("rank 1")));
  EXPECT_THAT(ended.out, AllOf(HasSubstr("after step 2"), HasSubstr("after step 4")));
  EXPECT_EQ(by_step("parts.jsonl"), by_step("whole.jsonl"));
  look({"diff", path("whole"), path("parts")});
}

// A run continues with the same data in the same order, on more ranks and under another strategy.
TEST_F(Checkpoints, MoreRanksResumeUnderAnotherStrategy) {
  run(run_of(2, "4", "parts", "parts.jsonl"));
  const std::string file = strategy("SHARD_GRADIENTS");
  const Ended ended = run(launch(3) + train(file, "more.jsonl", {"--steps", "8", "--resume", path("parts")}));
  EXPECT_THAT(ended.out, HasSubstr("after step 4"));
  EXPECT_EQ(steps("more.jsonl").size(), 4u);
}

TEST_F(Checkpoints, ReshardedCheckpointResumesWithTheSameBits) {
  run(run_of(2, "5", "whole", "whole.jsonl"));
  run(run_of(2, "3", "parts", "parts.jsonl"));
  EXPECT_THAT(look({"reshard", path("parts"), path("one"), "--files", "1"}).out, HasSubstr("in 1 file\n"));
  look({"diff", path("parts"), path("one")});
  look({"verify", path("one")});
  run(run_of(2, "5", "one", "parts.jsonl"));
  look({"diff", path("whole"), path("one")});
  EXPECT_EQ(by_step("parts.jsonl"), by_step("whole.jsonl"));
  look({"reshard", path("parts"), path("none"), "--files", "0"}, 64);
}

// A step has the same samples on any number of ranks: if there are fewer ranks, they accumulate more microbatches.
TEST_F(Checkpoints, OtherNumberOfRanksResumesWithTheSameGlobalBatch) {
  run(elastic_run(2, 6, "whole", "whole.jsonl"));
  int steps = 0;
  for (const int ranks : {2, 3, 1}) {
    const Ended ended = run(elastic_run(ranks, steps += 2, "parts", "parts.jsonl"));
    EXPECT_THAT(ended.out, HasSubstr("12 samples of"));
  }
  expect_same_losses("parts.jsonl", "whole.jsonl", 1e-4);  // other ranks make sums in another order
  EXPECT_EQ(steps, 6);
  const Ended uneven = run_program(elastic_run(1, 8, "parts", "parts.jsonl", {"--batch", "5"}), path("run"));
  EXPECT_EQ(uneven.code, 78);
  EXPECT_THAT(uneven.err, AllOf(HasSubstr("--global-batch 12"), HasSubstr("5 samples")));
  const Ended said = run_program(train(strategy("FULL_SHARD"), "m", {"--global-batch", "12"}), path("run"));
  EXPECT_EQ(said.code, 78);
  EXPECT_THAT(said.err, AllOf(HasSubstr("gradient_accumulation is 2"), HasSubstr("makes it 6")));
}

// Ranks are killed at random moments, and each time the run continues with another number of ranks.
TEST_F(Checkpoints, RandomKillsAndOtherRanksChangeNoLoss) {
  const char* const given = std::getenv("TESSERA_SOAK_SEED");
  const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  SCOPED_TRACE("TESSERA_SOAK_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const int kills = tests_are_long() ? 50 : 2, all = tests_are_long() ? 400 : 60;
  run(elastic_run(2, all, "whole", "whole.jsonl"), 600);
  for (int killed = 0; killed < kills;) {
    if (!std::filesystem::exists(path("parts/latest"))) std::filesystem::remove(path("parts.jsonl"));
    const int ranks = 1 + up_to(2);
    Program job(
        elastic_run(ranks, all, "parts", "parts.jsonl", {"--every-steps", std::to_string(1 + up_to(4)), "--keep", "2"}),
        path("job"));
    std::this_thread::sleep_for(std::chrono::milliseconds(200 + up_to(3000)));
    if (kill_some(job, up_to(2) > 0 && ranks > 1 ? up_to(ranks - 1) : -1)) {
      ++killed;
    } else {
      expect_same_losses("parts.jsonl", "whole.jsonl", 1e-4);
      std::filesystem::remove_all(path("parts"));
    }
  }
  if (!std::filesystem::exists(path("parts/latest"))) std::filesystem::remove(path("parts.jsonl"));
  run(elastic_run(1 + up_to(2), all, "parts", "parts.jsonl"), 600);
  expect_same_losses("parts.jsonl", "whole.jsonl", 1e-4);
}

// There are two hosts with one rank each. torchrun starts all ranks again when a host joins or leaves.
TEST_F(Checkpoints, HostsThatComeAndGoUnderTorchrunChangeNoLoss) {
  if (!std::filesystem::exists(torchrun())) GTEST_SKIP() << "torchrun is not installed";
  const Words host = elastic_host(free_port()) +
                     elastic_run(1, 1'000'000, "parts", "parts.jsonl", {"--every-steps", "1", "--keep", "2"});
  // Counts the lines of steps that `ranks` ranks made together. Only a line of several ranks names the rank that the
  // other ranks waited for.
  const auto made_by = [&](int ranks) {
    std::istringstream lines(read_file(path("parts.jsonl")));
    int count = 0;
    for (std::string line; std::getline(lines, line);)
      count += (line.find("waited_for_rank") != std::string::npos) == (ranks > 1);
    return count;
  };
  const auto wait_for_steps = [&](int ranks, const Program& job) {
    const int before = made_by(ranks);
    for (Deadline limit(std::chrono::seconds(60)); made_by(ranks) < before + 3;) {
      ASSERT_FALSE(limit.passed()) << ranks << " ranks\n" << job.out() << job.err();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  Program stays(host, path("stays"));
  const KilledHost until_the_end{stays};
  ASSERT_NO_FATAL_FAILURE(wait_for_steps(1, stays));
  {
    Program comes(host, path("comes"));
    const KilledHost soon{comes};
    ASSERT_NO_FATAL_FAILURE(wait_for_steps(2, stays));
  }
  ASSERT_NO_FATAL_FAILURE(wait_for_steps(1, stays));
  for (const pid_t pid : stays.descendants()) kill(pid, SIGTERM);  // the rank saves, and ends with exit code 0
  EXPECT_EQ(stays.wait(60).code, 0) << stays.err();
  std::int64_t last = 0;
  for (const nlohmann::json& step : steps("parts.jsonl")) last = std::max<std::int64_t>(last, step.at("step"));
  run(elastic_run(2, static_cast<int>(last), "whole", "whole.jsonl"), 600);
  expect_same_losses("parts.jsonl", "whole.jsonl", 1e-4);
}

// The best checkpoint is kept in addition to the newest one, even after a later run has continued.
TEST_F(Checkpoints, BestCheckpointStaysBesideTheNewest) {
  write_file(path("held_out"), read_file(path("text")).substr(0, 2000));
  const Words evaluate = {"--eval-data", path("held_out"), "--eval-every", "1", "--keep", "1", "--keep-best"};
  const auto strategy_with = [&](const char* rate) {
    const std::string file = path("rate.json");
    write_file(file,
               std::string(R"({"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "optimizer": {"lr": )") +
                   rate + "}}");
    return file;
  };
  const auto run_to = [&](const char* rate, const char* steps) {
    run(train(strategy_with(rate), "best.jsonl",
              Words{"--steps", steps, "--checkpoint-dir", path("parts")} + evaluate));
  };
  run_to("0.01", "3");
  run_to("1.0", "6");  // this rate makes the loss worse
  EXPECT_EQ(read_file(path("parts/best")), "step-000000000003\n");
  EXPECT_EQ(read_file(path("parts/latest")), "step-000000000006\n");
  EXPECT_THAT(look({"ls", path("parts")}).out, AllOf(HasSubstr("  best\n"), HasSubstr("  latest\n")));
  EXPECT_THAT(run(train(strategy_with("0.01"), "again.jsonl",
                        Words{"--steps", "4", "--checkpoint-dir", path("other"), "--resume", path("parts/best")}))
                  .out,
              HasSubstr("after step 3"));
  const Ended without =
      run_program(train(strategy_with("0.01"), "m", {"--keep-best", "--checkpoint-dir", path("x")}), path("run"));
  EXPECT_EQ(without.code, 64);
  EXPECT_THAT(without.err, HasSubstr("--eval-data"));
}

TEST_F(Checkpoints, UnresumableCheckpointIsAnError) {
  run(run_of(1, "3", "parts", "parts.jsonl"));
  const auto fail = [&](const Words& more) {
    return run_program(run_of(1, "5", "other", "other.jsonl", more), path("run"));
  };
  EXPECT_EQ(fail({"--resume", path("nowhere")}).code, 66);
  const Ended seed = fail({"--resume", path("parts"), "--seed", "8"});
  EXPECT_EQ(seed.code, 78) << seed.err;
  EXPECT_THAT(seed.err, HasSubstr("the seed was 7 and is 8 now"));
  const Ended no_folder = run_program(train(strategy("FULL_SHARD"), "m", {"--every-steps", "3"}), path("run"));
  EXPECT_EQ(no_folder.code, 64);
  EXPECT_THAT(no_folder.err, HasSubstr("--checkpoint-dir"));
  // A damaged checkpoint is reported, and not skipped.
  const std::string shard = latest("parts") + "/rank-00000.safetensors";
  std::string bytes = read_file(shard);
  bytes[bytes.size() / 2] ^= 1;
  write_file(shard, bytes);
  const Ended damaged = run_program(run_of(1, "5", "parts", "parts.jsonl"), path("run"));
  EXPECT_EQ(damaged.code, 65);
  EXPECT_THAT(damaged.err, AllOf(HasSubstr("rank-00000.safetensors"), HasSubstr("damaged")));
  const Ended verified = look({"verify", path("parts")}, 65);
  EXPECT_THAT(verified.err, AllOf(HasSubstr("They hold"), HasSubstr("1 of ")));
  EXPECT_EQ(run_program(run_of(1, "5", "parts", "new.jsonl", {"--resume", "none"}), path("run")).code, 0);
  // A folder whose checkpoints lack their manifests does not count as empty.
  const std::string pointer = read_file(path("parts/latest"));
  std::filesystem::remove(path("parts/latest"));
  for (const auto& entry : std::filesystem::directory_iterator(path("parts"))) {
    std::error_code is_file;
    std::filesystem::remove(entry.path() / "manifest.json", is_file);
  }
  const Ended lost = run_program(run_of(1, "5", "parts", "lost.jsonl"), path("run"));
  EXPECT_EQ(lost.code, 65) << lost.err;
  EXPECT_THAT(lost.err, HasSubstr("without a manifest, and no whole checkpoint"));
  write_file(path("parts/latest"), pointer);
  // A missing checkpoint is an error too.
  for (const auto& entry : std::filesystem::directory_iterator(path("parts"))) {
    if (entry.is_directory()) std::filesystem::remove_all(entry.path());
  }
  const Ended gone = run_program(run_of(1, "5", "parts", "gone.jsonl"), path("run"));
  EXPECT_EQ(gone.code, 66);
  EXPECT_THAT(gone.err, AllOf(HasSubstr("latest"), HasSubstr("not there")));
}

TEST_F(Checkpoints, CheckpointToolShowsListsAndCompares) {
  run(run_of(2, "3", "parts", "parts.jsonl", {"--every-steps", "2"}));
  EXPECT_THAT(
      look({"show", path("parts")}).out,
      AllOf(HasSubstr("step 3, of which 3 updated"), HasSubstr("2 ranks, mesh 1 x 2"), HasSubstr("exp_avg fp32"),
            HasSubstr("BF16 [256, 32]  3 updates"), HasSubstr("data: epoch 0, 24 of"), HasSubstr("\"width\"")));
  EXPECT_EQ(nlohmann::json::parse(look({"show", "--json", path("parts")}).out).at("step"), 3);
  EXPECT_THAT(look({"verify", path("parts") + "/step-000000000002"}).out, HasSubstr("is whole"));
  EXPECT_THAT(look({"diff", path("parts") + "/step-000000000002", path("parts")}, 1).out,
              AllOf(HasSubstr("master of "), HasSubstr("elements differ, by at most"), HasSubstr("steps 2 and 3")));
  EXPECT_THAT(look({"diff", path("parts"), latest("parts")}).out, ::testing::StartsWith("0 of "));
  EXPECT_EQ(run_program(tool({"ls", path("nowhere")}), path("run")).code, 66);
  EXPECT_EQ(run_program(tool({"show", path("text")}), path("run")).code, 66);
}

}  // namespace checkpoint_test
}  // namespace tessera::testing
