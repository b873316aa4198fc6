// Tests how strategies are read from JSON and printed: every key, the defaults of this version and of earlier versions,
// and errors about files.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"
#include "tests/config/strategy_schema.h"

namespace tessera {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using ::testing::HasSubstr;

std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::path(::testing::TempDir()) / (std::to_string(::getpid()) + "-" + name);
}

// Returns files that together satisfy the condition of every key.
const std::vector<std::string>& surroundings() {
  static const std::vector<std::string> files = {
      R"({})",
      R"({"mixed_precision": {"param": "fp16"}})",
      R"({"mixed_precision": {"param": "bf16"}})",
      R"({"optimizer": {"type": "sgd", "momentum": 0.5}})",
      R"({"optimizer": {"type": "rmsprop"}})",
      R"({"optimizer": {"type": "adagrad"}})",
      R"({"optimizer": {"type": "muon"}})",
      R"({"optimizer": {"type": "adafactor"}})",
      R"({"optimizer": {"type": "lamb", "groups": [{"max_dim": 1, "layer_adaptation": false}]}})",
      R"({"optimizer": {"type": "lars", "momentum": 0.9}})",
      R"({"optimizer": {"type": "own"}})",
      R"({"strategy": "HYBRID_SHARD"})",
      R"({"placement": {"parameters": [], "gradients": ["rank"], "optimizer": ["rank"]}})",
      R"({"strategy": "NO_SHARD", "units": {"bucket_cap_mb": 4}})",
      R"({"compression": {"gradients": "int4"}})",
      R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k", "momentum": 0.5}}})",
      R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "qsgd", "levels": 1, "seed": 3}}})",
      R"({"on_spike": {"action": "rollback"}, "checkpoint": {"dir": "a"}})",
      R"({"noise_scale": {"every": 50}})",
      R"({"secondary": {"form": "int8"}})",
      R"({"durable": {"every": 1, "dir": "a"}})",
      R"({"sync": {"type": "local_sgd", "every": 7}})",
      R"({"sync": {"type": "diloco", "every": 7}})",
      R"({"sync": {"type": "streaming_diloco", "every": 16}})",
      R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous"}})",
      R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "owners": "servers"}})",
      R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "delay_compensation": {"lambda": 1, "adaptive": true}}})",
      R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "hogwild"}})",
      R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "backups"}})",
      R"({"lr_schedule": {"type": "one_cycle", "total_steps": 5000}})",
      R"({"lr_schedule": {"type": "wsd", "total_steps": 5000, "decay_steps": 10}})",
      R"({"lr_schedule": {"warmup_steps": 10, "base_batch_size": 8}})",
      R"({"lr_schedule": {"warmup_epochs": 5, "base_batch_size": 8}, "optimizer": {"in_backward": true}})",
      R"({"lr_schedule": {"warmup_samples": 9, "base_batch_size": 8}, "sync": {"type": "local_sgd", "every": 7}})",
      R"({"mixed_precision": {"param": "bf16"}, "offload": {"paths": ["a"], "masters": {"tier": "nvme"}}})",
      R"({"offload": {"paths": ["a"], "parameters": {"tier": "nvme"}}})",
      R"({"offload": {"paths": ["a"], "moments": {"tier": "nvme"}}, "memory": {"limit": 1}})",
      R"({"offload": {"paths": ["a"], "activations": {"tier": "nvme"}}})",
      R"({"offload": {"moments": {"tier": "host"}}})",
      R"({"offload": {"activations": {"tier": "host"}}})",
      R"({"reproducible": true, "record_hashes": {"every": 7}})",
      R"({"gradient_sync": "last_microbatch"})",
      R"({"gradient_sync": "last_microbatch", "gradient_accumulation": 4, "deal": {"by": "speed"}})",
      R"({"gradient_sync": "last_microbatch", "reproducible": true, "deal": {"by": "speed"}})"};
  return files;
}

TEST(StrategyTable, DefaultsEqualThoseOfTheStruct) {
  const Strategy strategy;
  for (const StrategyKey& key : strategy_keys()) {
    EXPECT_EQ(key.field.get(strategy), ordered_json::parse(key.default_json)) << key.pointer;
  }
}

TEST(StrategyTable, RowTakesPathRangeUnitAndDefaultFromItsMember) {
  const StrategyKey* const key = find_strategy_key("/comm/timeout_s");
  ASSERT_NE(key, nullptr);
  EXPECT_EQ(describe_range(key->range), "above 0, at most 604800");
  EXPECT_EQ(key->unit, "seconds");
  EXPECT_EQ(key->default_json, "600.0");
  EXPECT_EQ(find_strategy_key("/sync/count")->default_json, "0");
}

// A variant is an object whose type decides which keys it has.
TEST(StrategyTable, EveryVariantTypeIsDocumentedAndReadBack) {
  std::size_t types = 0;
  for (const StrategyKey& key : strategy_keys()) {
    EXPECT_EQ(key.field.kind == ValueKind::kVariant, !key.field.types.empty()) << key.pointer;
    for (const VariantType& type : key.field.types) {
      ++types;
      EXPECT_TRUE(type.doc.ends_with('.') && type.cost.ends_with('.')) << type.name;
      Strategy strategy;
      type.choose(strategy);
      EXPECT_EQ(key.field.get(strategy)[kTypeKey], type.name);
      for (const StrategyKey& member : type.members) {
        const std::string where = type.name + " " + member.pointer;
        EXPECT_EQ(member.group(), key.pointer) << where;
        EXPECT_TRUE(member.doc.ends_with('.') && member.cost.ends_with('.')) << where;
        EXPECT_EQ(member.field.get(strategy), ordered_json::parse(member.default_json)) << where;
        const json object = {{kTypeKey, type.name}, {member.name(), json::parse(member.example_json)}};
        json file = json::parse(R"({"strategy": "NO_SHARD", "optimizer": {"type": "sgd", "momentum": 0.9}})");
        file[json::json_pointer(key.pointer)] = object;
        const auto read = parse_strategy(file.dump());
        ASSERT_TRUE(read.ok()) << where << read.status();
        EXPECT_EQ(schema_errors(file), "") << where;
        ordered_json wanted = key.field.get(strategy);
        EXPECT_NE(wanted[member.name()], ordered_json::parse(member.example_json)) << where;
        wanted[member.name()] = ordered_json::parse(member.example_json);
        EXPECT_EQ(key.field.get(*read), wanted) << where;
      }
    }
  }
  EXPECT_EQ(types, std::variant_size_v<CompressionMethod>);
}

TEST(StrategyTable, EveryRowIsUniqueAndDocumented) {
  std::set<std::string> pointers;
  for (const StrategyKey& key : strategy_keys()) {
    EXPECT_TRUE(pointers.insert(key.pointer).second) << key.pointer << " has two rows";
    EXPECT_TRUE(key.group().empty() || is_strategy_group(key.group())) << key.pointer;
    EXPECT_FALSE(key.doc.empty() || key.cost.empty() || key.example_json.empty()) << key.pointer;
    EXPECT_TRUE(key.doc.ends_with('.') && key.cost.ends_with('.')) << key.pointer;
    EXPECT_EQ(key.field.kind == ValueKind::kChoice, !key.field.choices.empty()) << key.pointer;
    for (const std::string& read : key.only_if.reads) EXPECT_NE(find_strategy_key(read), nullptr) << read;
  }
  for (const StrategyRule& rule : strategy_rules()) {
    for (const std::string& read : rule.keys) EXPECT_NE(find_strategy_key(read), nullptr) << read;
    EXPECT_EQ(rule.problem(Strategy{}), "") << rule.doc;
  }
}

// Each row sets a different member: setting one key changes only the value of that key.
TEST(StrategyTable, EachKeysExampleSetsItsOwnMemberAlone) {
  for (const StrategyKey& key : strategy_keys()) {
    bool accepted = false;
    for (const std::string& surrounding : surroundings()) {
      json file = json::parse(surrounding);
      file[json::json_pointer(key.pointer)] = json::parse(key.example_json);
      const auto strategy = parse_strategy(file.dump());
      if (!strategy.ok()) continue;
      accepted = true;
      EXPECT_EQ(schema_errors(file), "") << file;
      const auto before = parse_strategy(surrounding);
      for (const StrategyKey& other : strategy_keys()) {
        if (other.pointer == key.pointer) continue;
        if (other.rules_default && key.pointer == "/optimizer/type") continue;
        EXPECT_EQ(other.field.get(*strategy), other.field.get(*before)) << key.pointer << " changed " << other.pointer;
      }
      const ordered_json got = key.field.get(*strategy);
      const json wanted = json::parse(key.example_json);
      if (key.field.kind != ValueKind::kBytes) {
        EXPECT_EQ(json(got), wanted) << key.pointer;
      }
    }
    EXPECT_TRUE(accepted) << key.pointer << ": " << key.example_json;
  }
}

TEST(StrategyTable, EveryChoiceIsReadAndPrinted) {
  for (const StrategyKey& key : strategy_keys()) {
    for (const Choice& choice : key.field.choices) {
      Strategy strategy;
      key.field.set(strategy, choice.name);
      EXPECT_EQ(key.field.get(strategy), choice.name) << key.pointer;
    }
  }
}

TEST(OptimizerRows, EachTypeHasItsOwnRowAndWord) {
  std::set<std::string> words;
  for (const OptimizerRow& row : optimizer_rows()) {
    EXPECT_EQ(static_cast<std::size_t>(row.type), words.size()) << row.word;
    EXPECT_TRUE(words.insert(row.word).second) << row.word;
    EXPECT_EQ(name_of(row.type), row.word);
  }
  EXPECT_EQ(types_with(optimizer_traits::kCentered), "rmsprop");
  EXPECT_EQ(types_with(optimizer_traits::kNesterov), "sgd or lars");
}

TEST(Strategy, EmptyObjectIsAllDefaults) {
  const auto strategy = parse_strategy("{}");
  ASSERT_TRUE(strategy.ok());
  EXPECT_EQ(strategy->to_json(), Strategy{}.to_json());
}

TEST(Strategy, ReadsAWholeFile) {
  const auto strategy = parse_strategy(R"({
    "$schema": "strategy.schema.json",
    "strategy": "HYBRID_SHARD", "mesh": {"replicate": 2, "shard": 4},
    "units": {"classes": ["Block"], "modules": ["head"]}, "prefetch": 3,
    "mixed_precision": {"param": "fp16", "reduce": "fp16", "keep_fp32": ["LayerNorm"],
                        "loss_scale": {"initial": 1024, "hysteresis": 2}},
    "gradient_accumulation": 4, "gradient_sync": "last_microbatch", "gradient_clipping": 1,
    "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": true, "weight_decay": 1e-4, "shard_over": "world"},
    "lr_schedule": {"type": "wsd", "warmup_steps": 10, "total_steps": 1e3, "decay_steps": 100, "base_batch_size": 256},
    "memory": {"limit": "1.5GiB"}, "comm": {"transport": "host", "timeout_s": 5.5, "init_timeout_s": 7}})");
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_EQ(strategy->strategy, ShardingStrategy::kHybridShard);
  EXPECT_EQ(strategy->mesh.replicate, 2);
  EXPECT_EQ(strategy->mesh.shard, 4);
  EXPECT_EQ(strategy->units.classes, std::vector<std::string>{"Block"});
  EXPECT_EQ(strategy->units.modules, std::vector<std::string>{"head"});
  EXPECT_EQ(strategy->prefetch, 3);
  EXPECT_EQ(strategy->mixed_precision.param, DType::kF16);
  EXPECT_EQ(strategy->mixed_precision.keep_fp32, std::vector<std::string>{"LayerNorm"});
  EXPECT_EQ(strategy->mixed_precision.loss_scale.initial, 1024.0);
  EXPECT_EQ(strategy->mixed_precision.loss_scale.hysteresis, 2);
  EXPECT_EQ(strategy->gradient_sync, GradientSync::kLastMicrobatch);
  EXPECT_EQ(strategy->optimizer.type, OptimizerType::kSgd);
  EXPECT_TRUE(strategy->optimizer.nesterov);
  EXPECT_TRUE(strategy->optimizer.shard_over_world);
  EXPECT_EQ(strategy->lr_schedule.total_steps, 1000);
  EXPECT_EQ(strategy->memory.limit_bytes, std::int64_t{3} << 29);
  EXPECT_EQ(strategy->comm.transport, TransportChoice::kHost);
  EXPECT_EQ(strategy->comm.timeout_s, 5.5);
}

TEST(Strategy, ResolvedStrategyReadsBackTheSame) {
  for (const std::string& file : surroundings()) {
    const auto first = parse_strategy(file);
    ASSERT_TRUE(first.ok()) << first.status();
    const auto second = parse_strategy(first->to_json());
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(first->to_json(), second->to_json());
    EXPECT_EQ(schema_errors(json::parse(first->to_json())), "");
  }
}

TEST(Strategy, MissingOptimizerKeysGetTheRulesDefaults) {
  const auto read = [](const std::string& optimizer) {
    const auto strategy = parse_strategy(R"({"optimizer": )" + optimizer + "}");
    EXPECT_TRUE(strategy.ok()) << strategy.status();
    return strategy->optimizer;
  };
  const OptimizerConfig sgd = read(R"({"type": "sgd", "lr": 0.1})");
  EXPECT_EQ(sgd.weight_decay, 0);
  EXPECT_TRUE(sgd.lr.is_given() && !sgd.weight_decay.is_given());
  EXPECT_EQ(read(R"({"type": "sgd", "weight_decay": 0.01})").weight_decay, 0.01);
  EXPECT_EQ(read("{}").weight_decay, 0.01);
  Strategy made;
  made.optimizer.type = OptimizerType::kAdagrad;
  made.optimizer.eps = 1e-3;
  const auto resolved = json::parse(made.to_json())["optimizer"];
  EXPECT_EQ(resolved["lr"], 0.01);
  EXPECT_EQ(resolved["eps"], 1e-3);
  fill_in_defaults(made.optimizer);
  EXPECT_EQ(made.optimizer.lr, 0.01);
  made.optimizer.type = OptimizerType::kMuon;
  fill_in_defaults(made.optimizer);
  EXPECT_EQ(made.optimizer.weight_decay, 0.1);
  EXPECT_EQ(made.optimizer.eps, 1e-3);
}

/// This version must be able to read a file with all keys that 0.1 wrote.
TEST(Strategy, DefaultsWrittenBy01AreAcceptedWhereTheyHaveNoEffect) {
  EXPECT_TRUE(parse_strategy(R"({"optimizer": {"type": "sgd", "muon": {"adjust_lr": "match_rms_adamw"}}})").ok());
  EXPECT_FALSE(parse_strategy(R"({"optimizer": {"type": "sgd", "eps": 1e-10}})").ok());
}

TEST(Strategy, ChangedDefaultsAreListedWithOldAndNewValue) {
  const auto keys = [](OptimizerConfig optimizer) {
    std::vector<std::string> names;
    for (const ChangedDefault& each : changed_defaults(optimizer))
      names.push_back(each.key + " " + each.before + " " + each.now);
    return names;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(keys({}), ElementsAre());
  EXPECT_THAT(keys({.type = OptimizerType::kSgd}), ElementsAre("optimizer.weight_decay 0.01 0.0"));
  EXPECT_THAT(keys({.type = OptimizerType::kSgd, .weight_decay = 0.01}), ElementsAre());
  EXPECT_THAT(keys({.type = OptimizerType::kMuon, .weight_decay = 0.0}),
              ElementsAre(R"(optimizer.muon.adjust_lr "match_rms_adamw" "original")"));
  EXPECT_THAT(keys({.type = OptimizerType::kOwn}), ElementsAre());
  EXPECT_THAT(keys({.type = OptimizerType::kLion, .lr = 1e-3, .beta2 = 0.99, .weight_decay = 0.01}), ElementsAre());
}

TEST(Strategy, NumbersKeepAllTheirBits) {
  const auto strategy = parse_strategy(R"({"optimizer": {"lr": 0.00012345678901234567}})");
  ASSERT_TRUE(strategy.ok());
  EXPECT_EQ(strategy->optimizer.lr, 0.00012345678901234567);
  EXPECT_EQ(parse_strategy(strategy->to_json())->optimizer.lr, 0.00012345678901234567);
}

TEST(Strategy, NeutralValuesAreAllowedWithEveryRule) {
  EXPECT_TRUE(parse_strategy(R"({"optimizer": {"type": "adamw", "momentum": 0, "nesterov": false}})").ok());
  EXPECT_TRUE(parse_strategy(R"({"mesh": {"replicate": 1}})").ok());
  EXPECT_TRUE(parse_strategy(R"({"strategy": "SHARD_GRAD_OP", "mesh": {"replicate": 2}})").ok());
  EXPECT_TRUE(parse_strategy(R"({"lr_schedule": {"type": "inverse_sqrt"}})").ok());
  EXPECT_TRUE(parse_strategy(R"({"strategy": "NO_SHARD", "prefetch": 4})").ok());
}

TEST(Strategy, NullBucketCapMeansNoBuckets) {
  const auto strategy = parse_strategy(R"({"units": {"bucket_cap_mb": null, "classes": ["Block"]}})");
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_FALSE(strategy->units.bucket_cap_mb.has_value());
  EXPECT_EQ(*parse_strategy(R"({"strategy": "NO_SHARD", "units": {"bucket_cap_mb": 0}})")->units.bucket_cap_mb, 0);
}

TEST(Strategy, ByteOrderMarkIsSkipped) {
  EXPECT_TRUE(parse_strategy("\xEF\xBB\xBF{}").ok());
  const auto wrong = parse_strategy("\xEF\xBB\xBF{\"prefetch\": -1}");
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("strategy:1:14: /prefetch"));
}

TEST(Strategy, EnumeratorsHaveTheNamesOfTheFile) {
  EXPECT_EQ(name_of(ShardingStrategy::kShardGradOp), "SHARD_GRAD_OP");
  EXPECT_EQ(name_of(OptimizerType::kAdam), "adam");
  EXPECT_EQ(name_of(LrScheduleType::kOneCycle), "one_cycle");
}

TEST(StrategyFile, ErrorsNameTheFileAndLine) {
  const auto path = temporary("strategy.json");
  std::ofstream(path) << R"({"prefetch": 2})";
  const auto strategy = read_strategy(path);
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_EQ(strategy->prefetch, 2);

  std::ofstream(path) << "{\n \"prefetch\": -2}";
  const auto wrong = read_strategy(path);
  EXPECT_EQ(exit_code_of(wrong.status()), ExitCode::kConfig);
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr(path.string() + ":2:14: /prefetch: must be"));
  std::filesystem::remove(path);
}

TEST(StrategyFile, FilesThatCannotBeReadNamePathAndErrno) {
  const auto missing = read_strategy("/nonexistent/strategy.json");
  EXPECT_EQ(exit_code_of(missing.status()), ExitCode::kNoInput);
  EXPECT_THAT(std::string(missing.status().message()),
              HasSubstr("/nonexistent/strategy.json: cannot be opened: No such"));
  const auto folder = read_strategy("/");
  EXPECT_EQ(exit_code_of(folder.status()), ExitCode::kCorruptData);
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr("is a directory, want a regular file"));
}

TEST(StrategyFile, SizeIsLimited) {
  const auto path = temporary("large.json");
  std::ofstream(path) << "{}" << std::string((1 << 20) - 2, ' ');
  EXPECT_TRUE(read_strategy(path).ok()) << "1 MiB is allowed";
  std::ofstream(path, std::ios::app) << ' ';
  const auto large = read_strategy(path);
  EXPECT_EQ(exit_code_of(large.status()), ExitCode::kConfig);
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("larger than 1.00 MiB"));
  std::filesystem::remove(path);
}

TEST(StrategyFile, StrategyIsReadFromAPipe) {
  const auto path = temporary("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    std::ofstream(path) << R"({"prefetch": 5})" << std::flush;
    ::_exit(0);
  }
  const auto strategy = read_strategy(path);
  ASSERT_TRUE(strategy.ok()) << strategy.status();
  EXPECT_EQ(strategy->prefetch, 5);
  std::filesystem::remove(path);
}

TEST(StrategyFile, PipeWithoutAWriterIsAnErrorAtOnce) {
  const auto path = temporary("silent");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto strategy = read_strategy(path);
  EXPECT_EQ(exit_code_of(strategy.status()), ExitCode::kCorruptData);
  EXPECT_THAT(std::string(strategy.status().message()), HasSubstr("is a pipe that nobody wrote to"));
  std::filesystem::remove(path);
}

TEST(Strategy, TesseraStrictTurnsOnPrivateCopiesAndValueChecks) {
  const auto usual = parse_strategy("{}");
  ::setenv("TESSERA_STRICT", "1", 1);
  const auto strict = parse_strategy("{}");
  const auto on_gpus = parse_strategy(R"({"comm": {"transport": "nccl"}})");
  ::setenv("TESSERA_STRICT", "0", 1);
  const auto off = parse_strategy("{}");
  ::unsetenv("TESSERA_STRICT");
  EXPECT_TRUE(usual->host_sharing && !usual->check.values);
  EXPECT_TRUE(!strict->host_sharing && strict->check.values);
  EXPECT_TRUE(!on_gpus->host_sharing && !on_gpus->check.values) << "values of a GPU are not hashed";
  EXPECT_EQ(off->to_json(), usual->to_json());
}

}  // namespace
}  // namespace tessera
