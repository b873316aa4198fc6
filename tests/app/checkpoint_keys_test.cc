// Tests that `tessera train` follows a strategy file's keys about checkpoints and loss spikes.

#include <gmock/gmock.h>

#include <random>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace checkpoint_keys_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CheckpointKeys : public Workplace {
 protected:
  /// Runs training. `keys` go into the strategy file.
  Ended run_with(const std::string& keys, const std::string& metrics, const Words& more, int ranks = 1,
                 const std::string& faults = "") const {
    const Words training = train(strategy("FULL_SHARD", ", " + keys), metrics, more);
    return run_program((ranks > 1 ? launch(ranks) : Words{}) + training, path("run"), 60,
                       {{"TESSERA_TEST_FAULTS", faults}, {"TESSERA_LOG_LEVEL", "warning"}, {"OMP_NUM_THREADS", "1"}});
  }
  std::string listed(const std::string& folder) const {
    return run_program({TESSERA_PROGRAM, "checkpoint", "ls", path(folder)}, path("look")).out;
  }
};

TEST_F(CheckpointKeys, StrategysKeysAreUsedUnlessFlagsOverrideThem) {
  const std::string keys = R"("checkpoint": {"dir": ")" + path("file") + R"(", "every_steps": 2, "keep": 1})";
  const Ended by_file = run_with(keys, "a.jsonl", {"--steps", "5"});
  EXPECT_EQ(by_file.code, 0) << by_file.err;
  EXPECT_THAT(by_file.out, AllOf(HasSubstr("checkpoint after step 2"), HasSubstr("checkpoint after step 4"),
                                 HasSubstr("checkpoint after step 5"), Not(HasSubstr("checkpoint after step 3"))));
  EXPECT_THAT(listed("file"), AllOf(HasSubstr("step-000000000005"), Not(HasSubstr("step-000000000004"))));
  const Words flags = {"--steps", "5", "--checkpoint-dir", path("flag"), "--every-steps", "3", "--keep", "0"};
  const Ended by_flags = run_with(keys, "b.jsonl", flags);
  EXPECT_EQ(by_flags.code, 0) << by_flags.err;
  EXPECT_THAT(listed("flag"), AllOf(HasSubstr("step-000000000003"), HasSubstr("step-000000000005"),
                                    Not(HasSubstr("step-000000000002"))));
  EXPECT_EQ(losses("a.jsonl"), losses("b.jsonl"));
  const Ended nowhere = run_with(R"("checkpoint": {"every_steps": 2})", "c.jsonl", {});
  EXPECT_EQ(nowhere.code, 64);
  EXPECT_THAT(nowhere.err, AllOf(HasSubstr("--checkpoint-dir"), HasSubstr("checkpoint.dir")));
}

// Fault F22 (docs/faults.md): a full disk need not end training.
TEST_F(CheckpointKeys, TrainingEndsAfterTheAllowedFailedSaves) {
  const auto full_in = [](std::initializer_list<int> steps) {
    std::string rules;
    for (const int step : steps)
      rules += "write path=step-00000000000" + std::to_string(step) + " every=1 errno=ENOSPC; ";
    return rules;
  };
  for (const std::string async : {"false", "true"}) {
    const std::string folder = "async_" + async;
    const std::string keys =
        R"("checkpoint": {"dir": ")" + path(folder) + R"(", "every_steps": 1, "failures": 2, "async": )" + async + "}";
    const Ended goes_on = run_with(keys, folder + ".jsonl", {"--steps", "6"}, 2, full_in({2, 3, 5}));
    EXPECT_EQ(goes_on.code, 0) << goes_on.err;
    EXPECT_THAT(goes_on.err, AllOf(HasSubstr("no checkpoint after step 2"), HasSubstr("no checkpoint after step 3"),
                                   HasSubstr("number 2"), HasSubstr("no checkpoint after step 5"),
                                   HasSubstr("errno 28"), HasSubstr("rank ")));
    EXPECT_EQ(steps(folder + ".jsonl").size(), 6u);
    EXPECT_THAT(listed(folder), AllOf(HasSubstr("step-000000000004"), HasSubstr("step-000000000006"),
                                      Not(HasSubstr("step-000000000003")), Not(HasSubstr("step-000000000005"))));
    const Ended too_many = run_with(keys, folder + ".jsonl", {"--steps", "12"}, 1, full_in({7, 8, 9}));
    EXPECT_EQ(too_many.code, 74) << too_many.err;
    EXPECT_THAT(too_many.err, AllOf(HasSubstr("errno 28"), HasSubstr("number 2"), Not(HasSubstr("after step 9"))));
  }
  const Ended last =
      run_with(R"("checkpoint": {"dir": ")" + path("last") + R"(", "failures": 2})", "last.jsonl", {}, 1, full_in({3}));
  EXPECT_EQ(last.code, 74) << "the last save of a run must succeed: " << last.err;
}

/// Returns a text that is easily learned, except for a few characters.
std::string text_with_a_surprise() {
  std::string text(4000, 'a');
  std::mt19937 random(3);
  for (std::size_t i = 2000; i < 2080; ++i) text[i] = static_cast<char>('b' + random() % 25);
  return text;
}

// A run that resumes from the middle meets the same spikes, and rolls back to the same checkpoints.
TEST_F(CheckpointKeys, SpikeRollsBackToTheLastCheckpointAndDataGoOn) {
  write_file(path("text"), text_with_a_surprise());
  const auto keys = [&](const std::string& folder) {
    return R"("on_spike": {"action": "rollback", "factor": 5, "window": 8}, "lr_schedule": {"type": "cosine", "total_steps": 100},
              "checkpoint": {"every_steps": 10, "dir": ")" +
           path(folder) + "\"}";
  };
  const Ended whole = run_with(keys("whole"), "whole.jsonl", {"--steps", "60"});
  EXPECT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.err, AllOf(HasSubstr(": training goes on from " + path("whole") + "/step-0000000000"),
                               HasSubstr("with the next data")));
  const std::vector<nlohmann::json> all = steps("whole.jsonl");
  ASSERT_EQ(all.size(), 60u);
  int spikes = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].at("step"), i + 1);
    if (!all[i].at("spike").get<bool>() || i + 1 == all.size()) continue;
    EXPECT_GE(all[i + 1].at("lr"), all[i].at("lr")) << "the schedule goes back too, after step " << i + 1;
    spikes += all[i + 1].at("lr") > all[i].at("lr") ? 1 : 0;
  }
  EXPECT_GT(spikes, 0);
  EXPECT_THAT(whole.out, HasSubstr("  spike, skipped"));
  EXPECT_EQ(run_with(keys("parts"), "parts.jsonl", {"--steps", "30"}).code, 0);
  EXPECT_EQ(run_with(keys("parts"), "parts.jsonl", {"--steps", "60"}).code, 0);
  EXPECT_EQ(losses("parts.jsonl"), losses("whole.jsonl"));
}

}  // namespace checkpoint_keys_test
}  // namespace tessera::testing
