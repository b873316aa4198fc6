// Training that is interrupted: by the end of its steps, by a signal, by kill -9. The run that goes on ends with the same bits. And
// what `tessera checkpoint` says of the files.

#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tests/support/long_tests.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Checkpoints : public Workplace {
 protected:
  /// A run of `steps` steps on `ranks` ranks that saves to path(`folder`).
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
  void wait_for(Program& job, const std::string& file, const std::string& text) const {
    const auto start = std::chrono::steady_clock::now();
    while (read_file(file).find(text) == std::string::npos) {
      ASSERT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << job.out() << job.err();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  /// Steps by number, the last line of each: a run that goes on takes some steps again.
  std::map<int, std::string> by_step(const std::string& metrics) const {
    std::map<int, std::string> steps;
    for (const std::string& line : losses(metrics)) steps[std::stoi(line)] = line;
    return steps;
  }

  bool saves_beside_training_ = false;  ///< checkpoint.async of the next run_of
};

TEST_F(Checkpoints, MoreStepsGoOnWithTheSameBits) {
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
    // Nothing is left to do, and nothing is done.
    EXPECT_THAT(run(run_of(ranks, "12", "parts" + n, "parts.jsonl" + n)).out, HasSubstr("all steps were done before"));
  }
}

// Into the next epoch too: the text has few samples.
TEST_F(Checkpoints, ARunKilledAtAnyMomentGoesOnWithTheSameBits) {
  const std::string steps = "120";
  run(run_of(2, steps, "whole", "whole.jsonl"));
  ASSERT_GT(by_step("whole.jsonl").size(), 100u);
  int kills = 0;
  for (const int at : {7, 40, 41, 77}) {
    saves_beside_training_ = !saves_beside_training_;
    Program job(run_of(2, steps, "parts", "parts.jsonl", {"--every-steps", "3", "--keep", "2"}), path("job"));
    wait_for(job, path("parts.jsonl"), "\"step\":" + std::to_string(at) + ",");
    for (const pid_t pid : job.descendants()) {
      if (kill(pid, SIGKILL) == 0) ++kills;
    }
    EXPECT_NE(job.wait(20).code, 0);
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

// F10: ranks are killed at random moments, one or all, and the run goes on each time. Its end has the bits of a run that nothing
// happened to. TESSERA_SOAK_SEED repeats one.
TEST_F(Checkpoints, RandomKillsChangeNoBits) {
  const char* const given = std::getenv("TESSERA_SOAK_SEED");
  const auto seed = given ? static_cast<unsigned>(std::stoul(given)) : std::random_device()();
  SCOPED_TRACE("TESSERA_SOAK_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const int kills = tests_are_long() ? 200 : 2;
  const std::string steps = tests_are_long() ? "3000" : "400";
  run(run_of(2, steps, "whole", "whole.jsonl"), 600);
  for (int killed = 0; killed < kills;) {
    saves_beside_training_ = up_to(1) == 1;
    // What a run left that came to no checkpoint, the next one would not replace.
    if (!std::filesystem::exists(path("parts/latest"))) std::filesystem::remove(path("parts.jsonl"));
    Program job(
        run_of(2, steps, "parts", "parts.jsonl", {"--every-steps", std::to_string(1 + up_to(9)), "--keep", "2"}),
        path("job"));
    std::this_thread::sleep_for(std::chrono::milliseconds(200 + up_to(3000)));
    const std::vector<pid_t> processes = job.descendants();
    const pid_t rank = job.rank_pid(up_to(1));
    if (up_to(2) > 0 && rank > 0) {
      kill(rank, SIGKILL);
    } else {
      for (const pid_t pid : processes) kill(pid, SIGKILL);
    }
    const Ended ended = job.wait(30);
    if (ended.code != 0) {
      EXPECT_EQ(ended.code, 137) << ended.err;
      ++killed;
      if (std::filesystem::exists(path("parts/latest"))) look({"verify", path("parts")});
    } else {  // it had come to its end
      look({"diff", path("whole"), path("parts")});
      std::filesystem::remove_all(path("parts"));
    }
  }
  saves_beside_training_ = false;
  if (!std::filesystem::exists(path("parts/latest"))) std::filesystem::remove(path("parts.jsonl"));
  run(run_of(2, steps, "parts", "parts.jsonl", {"--every-steps", "100"}), 600);
  EXPECT_EQ(by_step("parts.jsonl"), by_step("whole.jsonl"));
  look({"diff", path("whole"), path("parts")});
}

TEST_F(Checkpoints, SignalsEndTheStepSaveAndExitWithZero) {
  run(run_of(2, "60", "whole", "whole.jsonl"));
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const std::string folder = "parts" + std::to_string(signal), metrics = folder + ".jsonl";
    Program job(run_of(2, "60", folder, metrics), path("job"));
    wait_for(job, path(metrics), "\"step\":9,");
    // One rank alone is told, or the launcher tells all.
    const pid_t whom = signal == SIGTERM ? job.rank_pid(1) : job.pid();
    ASSERT_GT(whom, 0);
    ASSERT_EQ(kill(whom, signal), 0);
    const Ended ended = job.wait(30);
    EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
    EXPECT_THAT(ended.out, AllOf(HasSubstr("training ends after step"), HasSubstr("checkpoint after step")));
    EXPECT_LT(by_step(metrics).size(), 60u);
    run(run_of(2, "60", folder, metrics));
    EXPECT_EQ(by_step(metrics), by_step("whole.jsonl"));
    look({"diff", path("whole"), path(folder)});
  }
}

// F2: a rank dies at any operation of a save. The others end too, the old checkpoint or the new one is whole, and what the next
// run goes on to has the bits of a run that nothing happened to.
TEST_F(Checkpoints, ARankThatDiesInASaveLeavesAWholeCheckpoint) {
  run(run_of(2, "2", "before", "before.jsonl"));
  run(run_of(2, "3", "whole", "whole.jsonl"));
  for (const std::string site : {"open", "write", "fsync", "rename", "mkdir"}) {
    int n = 1;
    for (bool died = true; died; ++n) {
      if (!tests_are_long() && n % 3 == 2) continue;
      std::filesystem::remove_all(path("parts"));
      std::filesystem::copy(path("before"), path("parts"), std::filesystem::copy_options::recursive);
      const std::string rule = site + " path=parts nth=" + std::to_string(n) + " crash";
      const Ended ended =
          run_program(run_of(2, "3", "parts", "died.jsonl"), path("run"), 60, {{"TESSERA_TEST_FAULTS", rule}});
      died = ended.code != 0;
      EXPECT_EQ(ended.code, died ? 137 : 0) << rule << ended.err;
      EXPECT_LT(ended.seconds, 30) << rule;
      look({"verify", path("parts")});
    }
    EXPECT_GT(n, 2) << site;
    run(run_of(2, "3", "parts", "died.jsonl"));
    look({"diff", path("whole"), path("parts")});
  }
}

// F1, F2: a rank dies in a save, twice. The launcher starts all again, and they go on from the last whole checkpoint.
TEST_F(Checkpoints, RestartsGoOnByThemselves) {
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

// The same data in the same order, on more ranks and under another strategy.
TEST_F(Checkpoints, OtherRanksGoOn) {
  run(run_of(2, "4", "parts", "parts.jsonl"));
  const std::string file = strategy("SHARD_GRADIENTS");
  const Ended ended = run(launch(3) + train(file, "more.jsonl", {"--steps", "8", "--resume", path("parts")}));
  EXPECT_THAT(ended.out, HasSubstr("after step 4"));
  EXPECT_EQ(steps("more.jsonl").size(), 4u);
}

TEST_F(Checkpoints, WhatCannotBeResumedIsAnError) {
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
  // A damaged one is not passed over in silence.
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
}

TEST_F(Checkpoints, TheToolSaysWhatIsThere) {
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

}  // namespace
}  // namespace tessera::testing
