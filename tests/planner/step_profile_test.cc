// Tests how the profile of a step is written, read and checked.

#include "planner/measured/step_profile.h"

#include <gtest/gtest.h>

#include <fstream>

#include "runtime/base/status.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

StepProfile some_profile() {
  return {.entries = {{"(root)", RoundPass::kForward, 0.1},
                      {"blocks.\"0\"", RoundPass::kForward, 1.0 / 3},
                      {"blocks.\"0\"", RoundPass::kBackward, 0}},
          .update_seconds = 0.02,
          .updated_elements = 123456789012345,
          .rest_seconds = 1e-9};
}

std::string refusal(const std::string& text) {
  const auto profile = parse_step_profile(text, "profile.json");
  EXPECT_FALSE(profile.ok()) << text;
  EXPECT_EQ(exit_code_of(profile.status()), ExitCode::kCorruptData);
  const std::string message = message_of(profile.status());
  EXPECT_NE(message.find("hint: "), std::string::npos) << message;
  return message.substr(0, message.rfind('\n'));  // the text names the program that writes such files
}

TEST(StepProfile, FileOfVersion01IsRead) {
  const char* const text = R"json({
  "entries": [
    {"unit": "(root)", "pass": "forward", "seconds": 0.003},
    {"unit": "blocks.0", "pass": "backward", "seconds": 0.025}
  ],
  "update": {"seconds": 0.02, "elements": 10640640},
  "rest_s": 0.001
})json";
  const auto profile = parse_step_profile(text, "profile.json");
  ASSERT_TRUE(profile.ok()) << profile.status();
  ASSERT_EQ(profile->entries.size(), 2u);
  EXPECT_EQ(profile->entries[0], (ProfileEntry{"(root)", RoundPass::kForward, 0.003}));
  EXPECT_EQ(profile->entries[1], (ProfileEntry{"blocks.0", RoundPass::kBackward, 0.025}));
  EXPECT_EQ(profile->update_seconds, 0.02);
  EXPECT_EQ(profile->updated_elements, 10640640);
  EXPECT_EQ(profile->rest_seconds, 0.001);
  EXPECT_DOUBLE_EQ(profile->step_seconds(/*microbatches=*/2), 2 * 0.028 + 0.02 + 0.001);
  EXPECT_DOUBLE_EQ(profile->step_seconds(/*microbatches=*/2.5), 2.5 * 0.028 + 0.02 + 0.001);
}

TEST(StepProfile, WrittenProfileReadsBackTheSame) {
  const auto profile = parse_step_profile(to_json(some_profile()), "x");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(*profile, some_profile());
  const std::string path = ::testing::TempDir() + "timing_profile.json";
  std::ofstream(path) << to_json(some_profile());
  ASSERT_TRUE(read_step_profile(path).ok());
  EXPECT_EQ(*read_step_profile(path), some_profile());
}

TEST(StepProfile, EveryRefusalNamesFileLineAndKey) {
  const std::string rest = R"("update": {"seconds": 0, "elements": 0}, "rest_s": 0})";
  EXPECT_EQ(refusal(R"({"entries": [{"unit": "a", "pass": "sideways", "seconds": 1}], )" + rest),
            "profile.json:1:36: /entries/0/pass: must be one of forward, backward, got the string \"sideways\"");
  EXPECT_EQ(refusal(R"({"entries": [{"unit": "a", "pass": "forward", "seconds": -1}], )" + rest),
            "profile.json:1:58: /entries/0/seconds: must be a number from 0 to 1e+09, got -1");
  EXPECT_EQ(refusal(R"({"entries": [7], )" + rest), "profile.json:1:14: /entries/0: must be an object, got 7");
  EXPECT_EQ(refusal(R"({"entries": [], )" + rest),
            "profile.json:1:13: /entries: must be a list of 1 to 65536, got a list of 0");
  EXPECT_EQ(refusal(R"({"entries": 3, )" + rest), "profile.json:1:13: /entries: must be a list, got 3");
  EXPECT_EQ(
      refusal(
          R"({"entries": [{"unit": "a", "pass": "forward", "seconds": 1}], "update": {"seconds": 1, "elements": 0}, )"
          R"("rest_s": 0})"),
      "profile.json:1:100: /update/elements: must be above 0 where the update takes time");
  EXPECT_EQ(refusal(R"({"entries": [{"unit": "a", "pass": "forward", "seconds": 1, "flops": 1}], )" + rest),
            "profile.json:1:61: /entries/0/flops: unknown key. [T0427] hint: known here: unit, pass, seconds");
}

TEST(StepProfile, MoreThan65536EntriesAreRefused) {
  StepProfile profile = some_profile();
  profile.entries.resize(65536, profile.entries[0]);
  EXPECT_TRUE(parse_step_profile(to_json(profile), "x").ok());
  profile.entries.push_back(profile.entries[0]);
  EXPECT_FALSE(parse_step_profile(to_json(profile), "x").ok());
}

TEST(StepProfile, FirstUnitMissingFromThePlanIsNamed) {
  const TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 2, 0, 0}, 2);
  const auto units = units_of(timed.profile, timed.plan());
  ASSERT_TRUE(units.ok()) << units.status();
  EXPECT_EQ(*units, (std::vector<int>{0, 1, 2, 2, 1, 0}));
  StepProfile profile = timed.profile;
  profile.entries[2].unit = "block.1";
  profile.entries[3].unit = "blocks.9";
  const absl::Status status = predict_step(timed.plan(), profile, timed.links).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
  EXPECT_NE(message_of(status).find(
                "/entries/2/unit: \"block.1\" is no unit of the plan, which has 3 of them. [T0426] hint: did you mean "
                "\"blocks.1\"?"),
            std::string::npos)
      << status;
}

}  // namespace
}  // namespace tessera::testing
