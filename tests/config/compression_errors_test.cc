// Tests what the methods of "compression" cannot be combined with.

#include <gtest/gtest.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"

namespace tessera {
namespace {

/// The error of a strategy with `compression` under NO_SHARD, with `more` behind it; empty where there is none.
std::string problem_of(const std::string& compression, const std::string& more = "") {
  const auto strategy =
      parse_strategy(R"({"strategy": "NO_SHARD", "compression": )" + compression + more + "}", "s.json");
  return strategy.ok() ? "" : message_of(strategy.status());
}

bool says(const std::string& problem, const std::string& text) { return problem.find(text) != std::string::npos; }

constexpr const char* kMethods[] = {R"("top_k": 0.1)",       R"("random_k": 0.1)", R"("sign": "majority")",
                                    R"("sign": "feedback")", R"("one_bit": true)", R"("qsgd_levels": 7)",
                                    R"("terngrad": true)"};

TEST(CompressionErrors, MethodsStandAlone) {
  for (const std::string method : kMethods) {
    EXPECT_EQ(problem_of("{" + method + "}"), "");
    EXPECT_EQ(problem_of("{" + method + R"(, "start_step": 3})"), "");
    const std::string other = R"("power_sgd_rank": 2)";
    EXPECT_TRUE(says(problem_of("{" + method + ", " + other + "}"), "there is one at most")) << method;
    EXPECT_TRUE(says(problem_of("{" + method + R"(, "gradients": "int8"})"), "cannot stand beside")) << method;
  }
}

TEST(CompressionErrors, MethodsGoWithFp32OfOneReplica) {
  for (const std::string method : kMethods) {
    const std::string compression = "{" + method + "}";
    EXPECT_TRUE(says(problem_of(compression, R"(, "mixed_precision": {"param": "fp16"})"), "take bf16")) << method;
    EXPECT_TRUE(says(problem_of(compression, R"(, "mixed_precision": {"param": "bf16", "reduce": "bf16"})"),
                     "sends fp32, and mixed_precision.reduce is bf16"))
        << method;
    EXPECT_TRUE(says(problem_of(compression, R"(, "mesh": {"replicate": 2})"), "needs one replica")) << method;
    const auto sharded = parse_strategy(R"({"compression": )" + compression + "}", "s.json");
    ASSERT_FALSE(sharded.ok());
    EXPECT_TRUE(says(message_of(sharded.status()), "it needs strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS"));
  }
}

// These are whole messages.
TEST(CompressionErrors, SayWhatToDo) {
  EXPECT_EQ(problem_of(R"({"hook": true, "top_k": 0.1})"),
            "s.json:1:65: /compression/top_k: of power_sgd_rank, top_k, random_k, sign, one_bit, qsgd_levels, terngrad "
            "and hook there is one at most. [T0550] hint: leave the others out");
  EXPECT_EQ(problem_of(R"({"start_step": 10})"),
            "s.json:1:56: /compression/start_step: 10 has no effect: it needs compression.power_sgd_rank, top_k, "
            "random_k, sign, one_bit, qsgd_levels, terngrad or hook. [T0518] hint: leave it out, or change that");
}

TEST(CompressionErrors, MomentumGoesWithWhatSquaresNoSingleGradient) {
  const auto problem = [](int start_step, const std::string& optimizer) {
    return problem_of(R"({"one_bit": true, "one_bit_momentum": 0.9, "start_step": )" + std::to_string(start_step) + "}",
                      R"(, "optimizer": )" + optimizer);
  };
  EXPECT_EQ(problem(0, R"({"type": "sgd", "momentum": 0.9})"), "");
  EXPECT_EQ(problem(0, R"({"type": "own"})"), "");
  EXPECT_EQ(problem(0, R"({"type": "lion"})"), "");
  EXPECT_EQ(problem(10, R"({"type": "adam", "freeze_step": 10})"), "");
  EXPECT_TRUE(says(problem(10, R"({"type": "adamw"})"), "set optimizer.freeze_step"));
  EXPECT_TRUE(says(problem(9, R"({"type": "adamw", "freeze_step": 10})"), "begins after 9 steps"));
  EXPECT_TRUE(says(problem(0, R"({"type": "sgd"})"), "is 0.9, and the optimizer's momentum is 0"));
  EXPECT_TRUE(says(problem(0, R"({"type": "lion", "betas": [0.8, 0.9]})"), "betas[0] is 0.8"));
  EXPECT_TRUE(says(
      problem(10, R"({"type": "adamw", "freeze_step": 10, "groups": [{"match": ["*.bias"], "betas": [0.5, 0.9]}]})"),
      "betas[0] is 0.5"));
  EXPECT_TRUE(says(problem_of(R"({"one_bit": true, "one_bit_momentum": 0.9})",
                              R"(, "gradient_clip_value": 1, "optimizer": {"type": "sgd", "momentum": 0.9})"),
                   "too wrong to be cut"));
  for (const std::string type : {"adagrad", "rmsprop", "muon", "lamb", "lars", "adafactor", "own_matrix"})
    EXPECT_TRUE(says(problem(10, R"({"type": ")" + type + R"("})"), "too wrong for " + type)) << type;
}

TEST(CompressionErrors, WhatHasNoEffectIsRefused) {
  EXPECT_TRUE(says(problem_of(R"({"one_bit_momentum": 0.9})"), "it needs compression.one_bit"));
  EXPECT_TRUE(says(problem_of(R"({"top_k_momentum": 0.9})"), "it needs compression.top_k above 0"));
  EXPECT_TRUE(says(problem_of(R"({"top_k": 0.1, "top_k_momentum": 1})"), "from 0 to below 1"));
  EXPECT_TRUE(says(problem_of(R"({"top_k": 0.1, "seed": 1})"), "it needs compression.random_k"));
  EXPECT_TRUE(
      says(problem_of(R"({"terngrad": true, "restore_skipped": true})"), "it needs compression.error_feedback"));
  EXPECT_TRUE(says(problem_of(R"({"sign": "majority", "restore_skipped": true})"), "has no effect"));
  EXPECT_EQ(problem_of(R"({"sign": "feedback", "restore_skipped": true})"), "");
  EXPECT_EQ(problem_of(R"({"gradients": "int8", "error_feedback": true, "restore_skipped": true})"), "");
  EXPECT_TRUE(
      says(problem_of(R"({"one_bit": true, "restore_skipped": true})", R"(, "optimizer": {"in_backward": true})"),
           "a step whose updates are under way is not skipped"));
}

}  // namespace
}  // namespace tessera
