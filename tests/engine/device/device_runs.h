#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/session.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {

// Helpers that compare runs on emulated GPUs (emulated_gpu.h) with the same runs on the CPU.

inline const Placed kStrategies[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                     ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
                                     ShardingStrategy::kFullShard};
inline constexpr ShardingStrategy kThree[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients,
                                              ShardingStrategy::kFullShard};
inline constexpr TinyOptions kTwoBlocks{.blocks = 2, .frozen_first_block = true};
inline constexpr TinyOptions kOfEveryKind{
    .blocks = 3, .tied_head = true, .frozen_first_block = true, .unused_block = true, .recompute = true};

/// Returns a run with more steps than may be in flight.
TrainOptions short_run();

/// Returns a strategy with clipping.
Strategy strategy_of(const Placed& placed, DType dtype, std::int64_t accumulation);

/// Returns a strategy with a learning-rate schedule, so that the number of steps made matters. Some steps are
/// skipped in fp16.
Strategy scheduled(ShardingStrategy kind, DType dtype);

/// The values after a run, and the results of its steps.
struct Told {
  std::vector<StepResult> steps;
  Values values, averages;
};
Told told_by(Session& session, std::vector<StepResult> steps);
void expect_same(const Told& got, const Told& wanted, const std::string& what);

/// Runs `body` on all ranks and returns the result of rank 0.
Told told_on(const ThreadRanks& ranks, const std::function<Told(const Mesh&)>& body);

/// Runs `body` for ranks with GPUs, once with each way of joining them. `what` names the case.
void on_gpus(int ranks, const std::function<void(const ThreadRanks& joined, const std::string& what)>& body);

/// Does the same as on_gpus, but with only one way of joining the ranks. The ways alternate from call to call; long
/// tests use all of them.
void on_gpus_in_turn(int ranks, const std::function<void(const ThreadRanks& joined, const std::string& what)>& body);

/// Checks that training under `strategy` on ranks with GPUs ends like `on_cpu` (or like the CPU under the same
/// strategy), and needs the memory that the plan says. Ranks are joined by `late` (tests/engine/device/emulated_gpu.h),
/// and by one more of the ways that give the same bits. These other ways alternate from call to call; in long tests all
/// of them are used.
void expect_same_on_gpus(const ThreadRanks& ranks, const Trained& on_cpu, const Strategy& strategy,
                         const TrainOptions& options, const std::string& what);
void expect_same_on_gpus(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options,
                         const std::string& what);

/// Trains with rates from a schedule, or with rates that the program sets. The program first sets the rate of all
/// groups, and then that of the last group. The run reads averages, unfreezes a unit, freezes another unit and saves.
/// Some steps later it loads the checkpoint in the same Engine.
Told led_through_everything(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                            const OwnRules& own_rules = {});

/// Checks that led_through_everything gives the same on two GPUs as on the CPU. It runs under three strategies, in bf16
/// and fp16, with rates from a schedule and from the program, and with averages. The ways to join GPUs alternate from
/// call to call. `with_rule` gives a strategy its optimizer.
void expect_led_as_on_the_cpu(const std::function<Strategy(Strategy)>& with_rule, const std::string& what,
                              const OwnRules& own_rules = {});

/// Checks a block that forward leaves out now and then. Its averages must continue, and its steps must be counted, as
/// on the CPU.
void expect_left_out_as_on_the_cpu(const std::function<Strategy(Strategy)>& with_rule, const std::string& what,
                                   const OwnRules& own_rules = {});

/// One case in the tests of an optimizer: its parameters, ranks, microbatches and states.
struct RuleCase {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
  StateDType states = StateDType::kF32;
};
inline const auto kRuleCases =
    ::testing::Values(RuleCase{DType::kF32, 1, 1}, RuleCase{DType::kBF16, 1, 3, StateDType::k8Bit},
                      RuleCase{DType::kF32, 2, 3, StateDType::kBF16}, RuleCase{DType::kF16, 2, 1},
                      RuleCase{DType::kBF16, 3, 1}, RuleCase{DType::kF32, 4, 1});
std::string name_of(const RuleCase& of);

/// Trains steps [begin, end).
std::vector<StepResult> train(Session& session, std::size_t begin, std::size_t end);

/// Trains, and saves after 6 steps.
Told saved_and_trained_on(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                          const OwnRules& own_rules = {});
/// Loads the checkpoint of saved_and_trained_on in an Engine that has trained something else, and trains on. `inexact`:
/// rank 0's LoadedCheckpoint::inexact.
Told loaded_and_trained_on(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                           std::vector<std::string>& inexact, const OwnRules& own_rules = {});
/// Checks that training on GPUs resumes from checkpoints of the CPU, and that training on the CPU resumes from
/// checkpoints of GPUs. Every second call also joins ranks on one GPU; in long tests each call does.
void expect_checkpoints_as_on_the_cpu(int ranks, const Strategy& strategy, const std::string& what,
                                      const OwnRules& own_rules = {});

}  // namespace tessera::testing
