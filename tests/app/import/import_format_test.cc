// What single keys become, which file is of which kind, and what cannot be read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "app/import/import_formats.h"
#include "app/import/translate.h"
#include "optim/lr_schedule.h"
#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_table.h"

namespace tessera::app {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TranslatedConfig translated(const std::string& text, const std::string& format = "deepspeed") {
  const auto config = translate_config(text, "config", format);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : TranslatedConfig{};
}

Strategy strategy_of(const TranslatedConfig& config) {
  const auto strategy = parse_strategy(config.strategy);
  EXPECT_TRUE(strategy.ok()) << strategy.status();
  return strategy.value_or(Strategy{});
}

KeyFate fate_of(const TranslatedConfig& config, const std::string& path) {
  const auto found =
      std::find_if(config.keys.begin(), config.keys.end(), [&](const KeyFate& key) { return key.path == path; });
  EXPECT_NE(found, config.keys.end()) << path;
  return found == config.keys.end() ? KeyFate{} : *found;
}

std::string error_of(const std::string& text, const std::string& name = "config") {
  const auto config = translate_config(text, name);
  EXPECT_FALSE(config.ok());
  EXPECT_EQ(exit_code_of(config.status()), ExitCode::kConfig) << config.status();
  return message_of(config.status());
}

TEST(ImportFormats, EveryRowHasAPlaceOfItsOwnAndAText) {
  for (const ImportFormat& format : import_formats()) {
    std::vector<std::string> names;
    for (const ImportRow& row : format.rows) {
      EXPECT_FALSE(row.doc.empty()) << row.name;
      EXPECT_TRUE(row.apply) << row.name;
      names.push_back(row.name);
    }
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << format.name;
  }
}

TEST(ImportFormats, TheKeysTellWhichItIs) {
  EXPECT_EQ(translated(R"({"zero_optimization": {"stage": 2}})", "").title, "a DeepSpeed configuration");
  EXPECT_EQ(translated("distributed_type: MULTI_CPU\nnum_processes: 2\n", "").title, "an Accelerate configuration");
  EXPECT_EQ(translated(R"({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}})", "").title,
            "an Accelerate configuration");
  EXPECT_EQ(translated(R"({"auto_wrap_policy": "NO_WRAP"})", "").title, "an fsdp_config of transformers");
  EXPECT_EQ(translated("zero_optimization:\n  stage: 1\n", "").title, "a DeepSpeed configuration");
}

TEST(ImportFormats, AFileOfNoKindAsksForTheFormat) {
  EXPECT_THAT(error_of(R"({"learning_rate": 1})"), AllOf(HasSubstr("config:1:1"), HasSubstr("--format")));
  EXPECT_THAT(error_of("{}"), HasSubstr("--format"));
  const TranslatedConfig config = translated(R"({"gradient_cliping": 1})");
  EXPECT_THAT(fate_of(config, "gradient_cliping").text, HasSubstr("did you mean \"gradient_clipping\"?"));
}

TEST(ImportFormats, WhatCannotBeReadIsAnErrorWithItsPlace) {
  EXPECT_THAT(error_of("{\"fp16\": }", "a.json"), HasSubstr("a.json:1:10"));
  EXPECT_THAT(error_of("{\"a\": 1, \"a\": 2}"), HasSubstr("given twice. hint: remove one; the first is at 1:2"));
  EXPECT_THAT(error_of("[1, 2]", "a.json"), HasSubstr("must be an object"));
  EXPECT_THAT(error_of("{\"a\": \"\xff\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(error_of(std::string(100, '[') + std::string(100, ']'), "a.json"), HasSubstr("nested more than"));
  std::string many = "{\"x0\": 0";
  for (int i = 1; i < 1000; ++i) many += ", \"x" + std::to_string(i) + "\": 0";
  EXPECT_THAT(error_of(many + "}"), HasSubstr("more values than a file of this kind may have"));
}

TEST(ImportFormats, AStrategyThatContradictsItselfIsAnErrorThatSaysHow) {
  const std::string text = R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}})";
  EXPECT_THAT(error_of(text), AllOf(HasSubstr("/optimizer/nesterov"), HasSubstr("hint:")));
}

TEST(ImportFormats, ControlCharactersOfAFileAreNotPrinted) {
  const TranslatedConfig config = translated("{\"a\\u001b[31m\": \"\\u001b[0m\", \"stage\\n\": [\"\\u001b\"]}");
  for (const KeyFate& key : config.keys)
    EXPECT_EQ((key.path + key.value + key.text).find_first_of("\x1b\n"), std::string::npos);
}

TEST(ImportDeepSpeed, ValuesOutsideOfTheirRangeAreRefusedAllAtOnce) {
  const TranslatedConfig config = translated(
      R"({"gradient_clipping": -1, "gradient_accumulation_steps": 1.5, "zero_optimization": {"stage": "three"},
          "optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5], "lr": true, "amsgrad": true}}})");
  EXPECT_THAT(config.refused,
              ::testing::ElementsAre("gradient_clipping", "gradient_accumulation_steps", "zero_optimization.stage",
                                     "optimizer.params.betas", "optimizer.params.lr", "optimizer.params.amsgrad"));
  EXPECT_THAT(fate_of(config, "optimizer.params.betas").text, HasSubstr("from 0 to below 1"));
}

TEST(ImportDeepSpeed, FixedLossScale) {
  const Strategy strategy = strategy_of(translated(
      R"({"fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 16, "loss_scale_window": 7}})"));
  EXPECT_FALSE(strategy.mixed_precision.loss_scale.dynamic);
  EXPECT_EQ(strategy.mixed_precision.loss_scale.initial, 128);
  EXPECT_EQ(strategy.mixed_precision.loss_scale.growth_interval, LossScaleConfig{}.growth_interval);
}

TEST(ImportDeepSpeed, DefaultsThatAreNotTesserasAreSet) {
  const Strategy strategy = strategy_of(translated(
      R"({"fp16": {"enabled": true}, "optimizer": {"type": "Adagrad"}, "zero_optimization": {"stage": 1}})"));
  EXPECT_EQ(strategy.mixed_precision.loss_scale.growth_interval, 1000);
  EXPECT_EQ(strategy.mixed_precision.loss_scale.hysteresis, 2);
  EXPECT_EQ(strategy.mixed_precision.reduce, DType::kF16);
  EXPECT_EQ(strategy.optimizer.lr, 0.01);
  EXPECT_EQ(strategy.optimizer.eps, 1e-10);
  EXPECT_EQ(strategy.optimizer.weight_decay, 0);
  EXPECT_EQ(strategy_of(translated(R"({"train_batch_size": 8})")).strategy, ShardingStrategy::kNoShard);
}

/// So a strategy stays what it is where defaults change.
TEST(ImportDeepSpeed, TheDefaultsOfAnOptimizerAreWrittenWhateverOursAre) {
  for (const std::string type : {"Adam", "AdamW", "SGD", "Lion", "Adagrad", "RMSprop"}) {
    for (const std::string mode : {"", R"(, "params": {"adam_w_mode": false})"}) {
      if (!mode.empty() && type != "Adam") continue;
      const auto written =
          nlohmann::json::parse(translated(R"({"optimizer": {"type": ")" + type + "\"" + mode + "}}").strategy);
      EXPECT_EQ(written.at("optimizer").at("weight_decay"), 0.0) << type << mode;
      if (type == "Lion") {
        EXPECT_EQ(written.at("optimizer").at("lr"), 0.001);
        EXPECT_EQ(written.at("optimizer").at("betas"), (nlohmann::json{0.9, 0.99}));
      }
    }
  }
}

TEST(ImportDeepSpeed, TheSchedulersPeakIsTheLearningRate) {
  const TranslatedConfig config = translated(
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25, "warmup_type": "linear"}}})");
  EXPECT_EQ(strategy_of(config).optimizer.lr, 0.25);
  EXPECT_EQ(fate_of(config, "optimizer.params.lr").fate, Fate::kIgnored);
  EXPECT_EQ(strategy_of(config).lr_schedule.warmup_steps, 1001);
}

// What DeepSpeed's schedulers make of update k: they take their first step after the first update.
double deepspeed_ratio(const std::string& type, std::int64_t update, double warmup, double total, double end) {
  const auto iteration = static_cast<double>(update - 1);
  if (iteration < 0) return 0;
  if (iteration < warmup) return iteration / warmup;
  if (type == "WarmupLR") return 1;
  if (type == "WarmupDecayLR") return std::max(0.0, (total - iteration) / std::max(1.0, total - warmup));
  const double progress = std::min(1.0, (iteration - warmup + 1) / std::max(1.0, total - warmup));
  return end + (1 - end) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

TEST(ImportDeepSpeed, SchedulesAreEqualFromTheEndOfTheWarmUpOnAndNearBefore) {
  const std::string params = R"(, "params": {"warmup_num_steps": 20, "warmup_type": "linear")";
  for (const std::string type : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}) {
    const std::string total = type == "WarmupLR" ? "" : R"(, "total_num_steps": 100)";
    const std::string end = type == "WarmupCosineLR" ? R"(, "cos_min_ratio": 0.1)" : "";
    const Strategy strategy =
        strategy_of(translated(R"({"scheduler": {"type": ")" + type + "\"" + params + total + end + "}}}"));
    for (std::int64_t update = 0; update < 130; ++update) {
      const double theirs = deepspeed_ratio(type, update, 20, 100, 0.1);
      const double ours = lr_ratio_at(strategy.lr_schedule, update);
      if (update > 20)
        EXPECT_NEAR(ours, theirs, 1e-12) << type << " update " << update;
      else
        EXPECT_TRUE(ours >= theirs && ours <= theirs + 2.0 / 20) << type << " update " << update;
    }
  }
}

TEST(ImportDeepSpeed, ALogarithmicWarmUpIsRefusedWhetherItIsSaidOrNot) {
  const std::string begin = R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5)";
  EXPECT_EQ(fate_of(translated(begin + "}}}"), "scheduler.type").fate, Fate::kRefused);
  EXPECT_EQ(fate_of(translated(begin + R"(, "warmup_type": "log"}}})"), "scheduler.params.warmup_type").fate,
            Fate::kRefused);
}

TEST(ImportDeepSpeed, BatchSizesThatContradictEachOtherAreRefused) {
  const TranslatedConfig agree =
      translated(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})");
  EXPECT_THAT(fate_of(agree, "train_batch_size").text, HasSubstr("8 ranks"));
  const TranslatedConfig differ =
      translated(R"({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2})");
  EXPECT_EQ(fate_of(differ, "train_batch_size").fate, Fate::kRefused);
}

TEST(ImportDeepSpeed, TwoDisksAreBothUsed) {
  const Strategy strategy = strategy_of(translated(
      R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
          "offload_param": {"device": "nvme", "nvme_path": "/a"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}})"));
  EXPECT_THAT(strategy.offload.paths, ::testing::ElementsAre("/a", "/b"));
  EXPECT_EQ(strategy.offload.masters.tier, Tier::kNvme);
}

TEST(ImportAccelerate, SectionsCountWithTheirDistributedTypeOnly) {
  const TranslatedConfig config =
      translated("distributed_type: MULTI_CPU\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", "accelerate");
  EXPECT_EQ(strategy_of(config).strategy, ShardingStrategy::kNoShard);
  EXPECT_EQ(fate_of(config, "fsdp_config.fsdp_sharding_strategy").fate, Fate::kIgnored);
}

TEST(ImportAccelerate, NumbersOfShardingStrategies) {
  const ShardingStrategy expected[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                                       ShardingStrategy::kNoShard, ShardingStrategy::kHybridShard};
  for (int number = 1; number <= 4; ++number) {
    const std::string text =
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: " + std::to_string(number) + "\n";
    EXPECT_EQ(strategy_of(translated(text, "accelerate")).strategy, expected[number - 1]) << number;
  }
  const TranslatedConfig fifth =
      translated("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: '5'\n", "accelerate");
  EXPECT_THAT(fate_of(fifth, "fsdp_config.fsdp_sharding_strategy").text, HasSubstr("SHARD_GRAD_OP"));
}

TEST(ImportFsdp, AKeyUnderTwoNamesIsRefused) {
  const TranslatedConfig config = translated(R"({"fsdp_version": 2, "version": 1})", "fsdp");
  EXPECT_THAT(config.refused, ::testing::ElementsAre("version"));
}

}  // namespace
}  // namespace tessera::app
