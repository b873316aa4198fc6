// Tests which combinations of "compression" methods with other keys are refused. Also tests the keys of version 0.1
// (one for each method), which this version still reads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

/// Reads a NO_SHARD strategy with this compression and the further keys `more`.
absl::StatusOr<Strategy> with_compression(const std::string& compression, const std::string& more = "") {
  return parse_strategy(R"({"strategy": "NO_SHARD", "compression": )" + compression + more + "}", "s.json");
}

std::string problem_of(const std::string& compression, const std::string& more = "") {
  const auto strategy = with_compression(compression, more);
  return strategy.ok() ? "" : message_of(strategy.status());
}

/// Returns the log lines that are written while a strategy with this compression is read.
std::string log_of(const std::string& compression) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(problem_of(compression), "");
  return ::testing::internal::GetCapturedStderr();
}

/// Returns the JSON object of each method except "none".
std::vector<std::string> methods() {
  std::vector<std::string> all;
  for (const VariantType& type : find_strategy_key("/compression/method")->field.types) {
    if (type.name != "none") all.push_back(R"({"type": ")" + type.name + R"("})");
  }
  return all;
}

TEST(CompressionMethods, UnsupportedStrategiesAndKeysBesideAMethodAreRefused) {
  for (const std::string& method : methods()) {
    const std::string compression = R"({"method": )" + method + "}";
    const auto with = [&](const std::string& more) { return problem_of(R"({"method": )" + method + more); };
    EXPECT_EQ(problem_of(compression), "");
    EXPECT_EQ(with(R"(, "start_step": 3})"), "");
    EXPECT_THAT(with(R"(, "gradients": "int8"})"), HasSubstr("cannot stand beside")) << method;
    EXPECT_THAT(problem_of(compression, R"(, "mixed_precision": {"param": "fp16"})"), HasSubstr("take bf16")) << method;
    EXPECT_THAT(problem_of(compression, R"(, "mixed_precision": {"param": "bf16", "reduce": "bf16"})"),
                HasSubstr("sends fp32, and mixed_precision.reduce is bf16"))
        << method;
    EXPECT_THAT(problem_of(compression, R"(, "mesh": {"replicate": 2})"), HasSubstr("needs one replica")) << method;
    const auto sharded = parse_strategy(R"({"compression": )" + compression + "}", "s.json");
    ASSERT_FALSE(sharded.ok());
    EXPECT_THAT(message_of(sharded.status()),
                HasSubstr("it needs strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS"));
  }
}

TEST(CompressionMethods, OneBitMomentumRefusesOptimizersThatSquareGradients) {
  const std::string one_bit = R"({"method": {"type": "one_bit", "momentum": 0.9}, "start_step": )";
  const auto problem = [&](int start_step, const std::string& optimizer) {
    return problem_of(one_bit + std::to_string(start_step) + "}", R"(, "optimizer": )" + optimizer);
  };
  EXPECT_EQ(problem(0, R"({"type": "sgd", "momentum": 0.9})"), "");
  EXPECT_EQ(problem(0, R"({"type": "own"})"), "");
  EXPECT_EQ(problem(0, R"({"type": "lion"})"), "");
  EXPECT_EQ(problem(10, R"({"type": "adam", "freeze_step": 10})"), "");
  EXPECT_THAT(problem(10, R"({"type": "adamw"})"), HasSubstr("set optimizer.freeze_step"));
  EXPECT_THAT(problem(9, R"({"type": "adamw", "freeze_step": 10})"), HasSubstr("begins after 9 steps"));
  EXPECT_THAT(problem(0, R"({"type": "sgd"})"), HasSubstr("has momentum 0.9, and the optimizer's momentum is 0"));
  EXPECT_THAT(problem(0, R"({"type": "lion", "betas": [0.8, 0.9]})"), HasSubstr("betas[0] is 0.8"));
  EXPECT_THAT(
      problem(10, R"({"type": "adamw", "freeze_step": 10, "groups": [{"match": ["*.bias"], "betas": [0.5, 0.9]}]})"),
      HasSubstr("betas[0] is 0.5"));
  EXPECT_THAT(
      problem_of(one_bit + "0}", R"(, "gradient_clip_value": 1, "optimizer": {"type": "sgd", "momentum": 0.9})"),
      HasSubstr("too wrong to be cut"));
  for (const std::string type : {"adagrad", "rmsprop", "muon", "lamb", "lars", "adafactor", "own_matrix"})
    EXPECT_THAT(problem(10, R"({"type": ")" + type + R"("})"), HasSubstr("too wrong for " + type)) << type;
}

TEST(CompressionMethods, KeysWithoutEffectAreRefused) {
  EXPECT_EQ(problem_of(R"({"start_step": 10})"),
            "s.json:1:56: /compression/start_step: 10 has no effect: it needs a compression.method other than none. "
            "[T0518] hint: leave it out, or change that");
  const auto restores = [](const std::string& type) {
    return problem_of(R"({"method": {"type": ")" + type + R"("}, "restore_skipped": true})");
  };
  EXPECT_THAT(restores("terngrad"),
              HasSubstr("it needs compression.error_feedback, or a compression.method that keeps"));
  EXPECT_THAT(restores("sign_majority"), HasSubstr("has no effect"));
  EXPECT_EQ(restores("sign_feedback"), "");
  EXPECT_EQ(problem_of(R"({"gradients": "int8", "error_feedback": true, "restore_skipped": true})"), "");
  EXPECT_THAT(problem_of(R"({"method": {"type": "one_bit"}, "restore_skipped": true})",
                         R"(, "optimizer": {"in_backward": true})"),
              HasSubstr("a step whose updates are under way is not skipped"));
}

TEST(CompressionMethods, DescriptionUsesTheNamesOfTheFile) {
  EXPECT_EQ(describe(TopKConfig{.fraction = 0.25}), "top_k, fraction 0.25, momentum 0.0");
  EXPECT_EQ(describe(PowerSgdConfig{}), "power_sgd, rank 4");
  EXPECT_EQ(describe(SignMajorityConfig{}), "sign_majority");
}

struct OldAndNew {
  const char* old;
  const char* now;
};
constexpr OldAndNew kOldAndNew[] = {
    {R"({"power_sgd_rank": 2})", R"({"method":{"type":"power_sgd","rank":2}})"},
    {R"({"top_k": 0.25, "top_k_momentum": 0.5, "start_step": 1})",
     R"({"method":{"type":"top_k","fraction":0.25,"momentum":0.5},"start_step":1})"},
    {R"({"top_k": 1})", R"({"method":{"type":"top_k","fraction":1}})"},
    {R"({"seed": 7, "random_k": 0.1, "restore_skipped": true})",
     R"({"method":{"type":"random_k","fraction":0.1,"seed":7},"restore_skipped":true})"},
    {R"({"sign": "majority"})", R"({"method":{"type":"sign_majority"}})"},
    {R"({"sign": "feedback"})", R"({"method":{"type":"sign_feedback"}})"},
    {R"({"one_bit": true, "one_bit_momentum": 0})", R"({"method":{"type":"one_bit","momentum":0}})"},
    {R"({"qsgd_levels": 127, "seed": 3})", R"({"method":{"type":"qsgd","levels":127,"seed":3}})"},
    {R"({"terngrad": true})", R"({"method":{"type":"terngrad"}})"},
    {R"({"hook": true})", R"({"method":{"type":"hook"}})"},
    {R"({"gradients": "int8", "top_k": 0, "hook": false, "sign": "none", "seed": 0})", R"({"gradients":"int8"})"},
};

// Training depends only on the strategy, so it is enough to compare strategies.
TEST(OldCompressionKeys, GiveTheStrategyOfTheNewFormInTheWarning) {
  for (const auto& [old, now] : kOldAndNew) {
    EXPECT_THAT(log_of(old), HasSubstr("hint: write \"compression\": " + std::string(now) + "\n")) << old;
    EXPECT_EQ(log_of(now), "");
    EXPECT_EQ(with_compression(old)->to_json(), with_compression(now)->to_json()) << old;
  }
}

TEST(OldKeys, DelayCompensationThatIsANumberIsItsLambda) {
  const auto read = [](const std::string& delay) {
    ::testing::internal::CaptureStderr();
    const auto strategy = parse_strategy(
        R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "delay_compensation": )" + delay + "}}",
        "s.json");
    EXPECT_TRUE(strategy.ok()) << strategy.status();
    return std::pair(strategy.ok() ? strategy->to_json() : "", ::testing::internal::GetCapturedStderr());
  };
  const auto [old, warning] = read("0.25");
  const auto [now, nothing] = read(R"({"lambda": 0.25})");
  EXPECT_EQ(old, now);
  EXPECT_THAT(warning, HasSubstr(R"(hint: write "delay_compensation": {"lambda":0.25})"));
  EXPECT_EQ(nothing, "");
}

TEST(OldCompressionKeys, OnlyRankZeroWarns) {
  ::setenv("RANK", "1", 1);
  EXPECT_EQ(log_of(R"({"top_k": 0.1})"), "");
  ::setenv("RANK", "0", 1);
  EXPECT_THAT(log_of(R"({"top_k": 0.1})"), HasSubstr("this version is the last that reads top_k."));
  ::unsetenv("RANK");
}

TEST(OldCompressionKeys, NamingNoMethodOrTwoIsRefused) {
  EXPECT_EQ(problem_of(R"({"method": {"type": "hook"}, "top_k": 0.1})"),
            "s.json:1:79: /compression/top_k: cannot stand beside \"method\", which took its place. [T0736] hint: "
            "leave it out");
  EXPECT_EQ(problem_of(R"({"hook": true, "top_k": 0.1})"),
            "s.json:1:65: /compression/top_k: cannot stand beside hook: one method makes the sums. [T0550] hint: leave "
            "one of "
            "them out");
  EXPECT_THAT(
      problem_of(R"({"one_bit_momentum": 0.9})"),
      HasSubstr("/compression/one_bit_momentum: 0.9 has no effect: it needs compression.method of type one_bit."));
  EXPECT_THAT(problem_of(R"({"top_k": 0.1, "seed": 1})"), HasSubstr("of type random_k or qsgd or terngrad."));
}

TEST(OldCompressionKeys, WrongValuesAreRefusedAtTheirPlace) {
  EXPECT_THAT(problem_of(R"({"top_k": 1.5})"),
              HasSubstr("s.json:1:51: /compression/method/fraction: must be a number above 0, at most 1, got 1.5"));
  EXPECT_THAT(problem_of(R"({"power_sgd_rank": true})"), HasSubstr("/compression/method/rank: must be an integer"));
  EXPECT_THAT(problem_of(R"({"one_bit": 1})"), HasSubstr("/compression/one_bit: must be true or false, got 1"));
  EXPECT_THAT(problem_of(R"({"sign": "vote"})"),
              HasSubstr("/compression/sign: must be one of none, majority, feedback"));
}

}  // namespace
}  // namespace tessera
