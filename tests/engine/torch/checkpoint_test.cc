// Tests checkpoints of Engines: training continues with the same bits under any strategy and number of ranks. A faulty
// checkpoint is an error on all ranks that changes nothing.

#include "tessera/checkpoint.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/inexact.h"
#include "offload/files/fault_plan.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace checkpoint_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

struct Steps {
  std::vector<StepResult> results;
  Values values, averages;  ///< averages exist if the strategy has "ema"
};

Steps train(Session& session, std::size_t begin, std::size_t end) {
  Steps steps;
  for (std::size_t i = begin; i < end; ++i) {
    while (!session.engine.step_is_due()) session.engine.backward(session.loss(i), {.tokens = 1, .samples = 1});
    steps.results.push_back(session.engine.step());
  }
  steps.values = session.values();
  if (session.engine.strategy().ema.decay > 0) {
    const Gathered guard(session.engine, Gathered::kEma);
    steps.averages = values_of(*session.model);
  }
  return steps;
}

bool same_number(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void expect_same(const Steps& got, const Steps& wanted, const std::string& what) {
  ASSERT_EQ(got.results.size(), wanted.results.size());
  for (std::size_t i = 0; i < got.results.size(); ++i) {
    const StepResult &a = got.results[i], &b = wanted.results[i];
    EXPECT_TRUE(a.step == b.step && same_number(a.loss, b.loss) && same_number(a.grad_norm, b.grad_norm) &&
                a.lr == b.lr && a.overflow == b.overflow && a.loss_scale == b.loss_scale)
        << what << ", step " << a.step << ": " << a.loss << " " << b.loss << ", " << a.grad_norm << " " << b.grad_norm;
  }
  EXPECT_TRUE(all_same_bits(got.values, wanted.values)) << what;
  EXPECT_TRUE(all_same_bits(got.averages, wanted.averages)) << what;
}

/// Trains, saves, and trains on. Then loads the checkpoint into an Engine that has trained something else, trains on,
/// and compares.
void expect_resume(const Mesh& mesh, const Strategy& strategy, const TinyOptions& model, const std::string& folder,
                   const std::string& what) {
  Session first(mesh, strategy, model);
  train(first, 0, 3);
  save_checkpoint(first.engine, folder);
  const Steps wanted = train(first, 3, 6);
  Session second(mesh, strategy, model);
  train(second, 4, 5);
  const LoadedCheckpoint loaded = load_checkpoint(second.engine, folder);
  EXPECT_EQ(loaded.step, 3);
  EXPECT_THAT(loaded.inexact, IsEmpty()) << what;
  EXPECT_EQ(second.engine.steps_applied(), wanted.results[0].overflow ? 0 : first.engine.steps_applied() - 3) << what;
  expect_same(train(second, 3, 6), wanted, what);
}

TEST(Checkpoint, ResumedRunHasTheSameBits) {
  const TinyOptions again{.shared_block = true, .recompute = true};
  const std::pair<TinyOptions, int> runs[] = {{kAwkward, 1}, {kAwkward, 2}, {again, 2}, {kWide, 3}, {kAwkward, 4}};
  for (const auto& [kept, placed, run] : pairwise_of<2>(sampled_kept(), kOnePerPlacement, runs)) {
    const auto& [model, ranks] = run;
    const TestFolder folder;
    const std::string what = name_of(kept) + ", " + name_of(placed) + " on " + std::to_string(ranks) + " ranks";
    const TinyOptions& options = model;
    const Strategy strategy = strategy_of(kept, placed);
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { expect_resume(mesh, strategy, options, folder.path(), what); });
  }
}

TEST(Checkpoint, ResumedRunWithStatesOnDiskHasTheSameBits) {
  constexpr Below kBelow[] = {{0, 1, 1, 4096, 0, 1}, {0, 0.5, 0.3, 4096, 0, 3}};
  for (const auto& [below, placed, kept] : pairwise_of<2>(kBelow, kOnePerPlacement, sampled_kept())) {
    const TestFolder folder;
    const std::string what = name_of(kept) + ", " + name_of(placed);
    const Strategy strategy = strategy_of(kept, placed, &below);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) { expect_resume(mesh, strategy, kAwkward, folder.path(), what); });
  }
}

// Each case changes one setting, such as a schedule, groups, a rule or a placement, on four ranks of two hosts. One
// more case has steps that overflow, on two ranks.
TEST(Checkpoint, ResumedSchedulesScalesAndGroupsHaveTheSameBits) {
  const std::pair<const char*, std::function<void(Strategy&)>> kinds[] = {
      {"accumulation", [](Strategy& s) { s.gradient_accumulation = 2; }},
      {"schedule",
       [](Strategy& s) { s.lr_schedule = {.type = LrScheduleType::kCosine, .warmup_steps = 2, .total_steps = 8}; }},
      {"in backward", update_in_backward},
      {"groups", [](Strategy& s) { s.optimizer.groups = {{.match = {"*.bias"}, .lr_ratio = 2}}; }},
      {"sgd", [](Strategy& s) { s.optimizer.type = OptimizerType::kSgd, s.optimizer.momentum = 0.9; }},
      {"lion",
       [](Strategy& s) { s.optimizer.type = OptimizerType::kLion, s.optimizer.state_dtype = StateDType::k8Bit; }},
      {"frozen second moments", [](Strategy& s) { s.optimizer.freeze_step = 3; }},
      {"adagrad", [](Strategy& s) { s.optimizer.type = OptimizerType::kAdagrad, s.optimizer.lr_decay = 0.1; }},
      {"rmsprop with all its states",
       [](Strategy& s) {
         s.optimizer.type = OptimizerType::kRmsprop, s.optimizer.momentum = 0.9, s.optimizer.centered = true;
         s.ema.decay = 0.9;
       }},
      {"narrow moments beside an average",
       [](Strategy& s) { s.optimizer.state_dtype = StateDType::k8Bit, s.ema.decay = 0.9; }},
      {"sgd without states", [](Strategy& s) { s.optimizer.type = OptimizerType::kSgd; }},
      {"buckets",
       [](Strategy& s) { s.strategy = ShardingStrategy::kNoShard, s.units = {}, s.units.bucket_cap_mb = 0.01; }},
      {"hybrid", [](Strategy& s) { s.strategy = ShardingStrategy::kHybridShard; }},
      {"hybrid, world",
       [](Strategy& s) { s.strategy = ShardingStrategy::kHybridShard, s.optimizer.shard_over_world = true; }},
      {"zero 1", [](Strategy& s) { s.strategy = ShardingStrategy::kShardOptimizer; }}};
  for (const auto& [kind, is_shared] : pairwise_of<1>(kinds, std::array{false, true})) {
    const TestFolder folder;
    const Strategy strategy = strategy_for(Placed(ShardingStrategy::kFullShard, is_shared), kind.second);
    const std::string what = kind.first;
    run_ranks({.ranks = 4, .hosts = 2},
              [&](const Mesh& mesh) { expect_resume(mesh, strategy, kAwkward, folder.path(), what); });
  }
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard, nullptr, DType::kF16);
    strategy.mixed_precision.loss_scale.initial = 4294967296.0;  // some steps overflow before and after the save
    Session first(mesh, strategy);
    train(first, 0, 3);
    save_checkpoint(first.engine, folder.path());
    const Steps wanted = train(first, 3, 12);
    EXPECT_TRUE(wanted.results.front().overflow);
    Session second(mesh, strategy);
    load_checkpoint(second.engine, folder.path());
    expect_same(train(second, 3, 12), wanted, "overflows");
  });
}

TEST(Checkpoint, RatesSetByHandComeBack) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) {
      s.lr_schedule.type = LrScheduleType::kManual;
      s.optimizer.groups = {{.name = "biases", .match = {"*.bias"}},
                            {.name = "head", .match = {"head"}, .lr_ratio = 0.5}};
    });
    Session first(mesh, strategy);
    first.engine.set_lr(0.004);
    first.engine.set_lr("head", 0.0123);
    train(first, 0, 2);
    save_checkpoint(first.engine, folder.path());
    const Steps wanted = train(first, 2, 4);
    Session second(mesh, strategy);
    load_checkpoint(second.engine, folder.path());
    expect_same(train(second, 2, 4), wanted, "rates");
  });
}

// Checkpoints go from N ranks to M ranks and back to N. Every byte that was saved is restored, in whatever way the M
// ranks held it.
TEST(Checkpoint, OtherRanksAndStrategiesKeepEverySavedByte) {
  const Placed kOthers[] = {ShardingStrategy::kNoShard, Placed(ShardingStrategy::kFullShard, true),
                            Placed(ShardingStrategy::kFullShard, false, true), ShardingStrategy::kShardGradOp};
  struct First {
    std::shared_ptr<TestFolder> folder;
    std::string path;
    std::map<std::string, std::string> tensors;
  };
  const auto saved_by = [](int ranks, const Kept& kept) {
    First first{std::make_shared<TestFolder>(), {}, {}};
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_of(kept, ShardingStrategy::kFullShard), kAwkward);
      train(session, 0, 3);
      const std::string saved = save_checkpoint(session.engine, first.folder->path());
      if (mesh.rank() == 0) first.path = saved;
    });
    first.tensors = tensors_of(first.path);
    return first;
  };
  MadeOnce<First> firsts;
  for (const auto& each : pairwise_of(sampled_kept(), std::array{1, 2, 3}, std::array{1, 2, 3, 4})) {
    const Kept& kept = std::get<0>(each);
    const int ranks = std::get<1>(each), others = std::get<2>(each);
    const std::string of = name_of(kept) + ", " + std::to_string(ranks);
    const First& first = firsts(of, [&] { return saved_by(ranks, kept); });
    const std::string& path = first.path;
    const Placed& placed = kOthers[(others + ranks) % 4];
    const TestFolder two, three;
    const std::string what = of + " -> " + std::to_string(others) + " " + name_of(placed);
    std::string between, back;
    run_ranks({.ranks = others}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_of(kept, placed), kAwkward);
      train(session, 1, 2);
      load_checkpoint(session.engine, path);
      const std::string saved = save_checkpoint(session.engine, two.path());
      if (mesh.rank() == 0) between = saved;
    });
    EXPECT_EQ(tensors_of(between), first.tensors) << what;
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_of(kept, ShardingStrategy::kFullShard), kAwkward);
      load_checkpoint(session.engine, two.path());
      const std::string saved = save_checkpoint(session.engine, three.path());
      if (mesh.rank() == 0) back = saved;
    });
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = "rank-0000" + std::to_string(rank) + ".safetensors";
      EXPECT_EQ(TestFolder::content_of(back + "/" + name), TestFolder::content_of(path + "/" + name))
          << what << " " << name;
    }
  }
}

// No element is written twice. Files of replicated state are as large as those of sharded state.
TEST(Checkpoint, ReplicatedStateIsWrittenOnceInEqualParts) {
  for (const Placed& placed : kInMemory) {
    const TestFolder folder;
    const std::string path = of_rank_zero({.ranks = 3}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_of(kKept[0], placed), kWide);
      return save_checkpoint(session.engine, folder.path());
    });
    const auto checkpoint = SavedCheckpoint::open(path, "test");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const SavedFile& file : (*checkpoint)->manifest().files)
      EXPECT_GT(file.data_bytes(), 45000) << name_of(placed);
  }
}

// The fp32 masters do not depend on the dtype in which parameters are used.
TEST(Checkpoint, AnotherPrecisionKeepsTheMasters) {
  for (const DType from : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Kept& to : kKept) {
      if (to.state == StateDType::k8Bit) continue;
      const TestFolder one, two;
      std::string path, again;
      std::vector<std::string> inexact;
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session first(mesh, strategy_for(ShardingStrategy::kFullShard, nullptr, from), kWide);
        train(first, 0, 3);
        const std::string saved = save_checkpoint(first.engine, one.path());
        Session second(mesh, strategy_of(to, ShardingStrategy::kShardGradients), kWide);
        const LoadedCheckpoint loaded = load_checkpoint(second.engine, one.path());
        const std::string saved_again = save_checkpoint(second.engine, two.path());
        train(second, 3, 4);
        if (mesh.rank() == 0) path = saved, again = saved_again, inexact = loaded.inexact;
      });
      const auto wanted = tensors_of(path), got = tensors_of(again);
      for (const auto& [key, bytes] : wanted) {
        if (key.starts_with("master|") || to.state == StateDType::kF32) {
          EXPECT_EQ(got.at(key), bytes) << key;
        }
      }
      EXPECT_EQ(inexact.empty(), to.state == StateDType::kF32) << ::testing::PrintToString(inexact);
      if (!inexact.empty()) {
        EXPECT_THAT(inexact[0], HasSubstr("rounded to bf16"));
      }
    }
  }
}

TEST(Checkpoint, OtherNoiseVersionIsReportedWhereItMatters) {
  const auto expect_said = [](const Strategy& strategy, const std::string& wanted) {
    const TestFolder folder;
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, kWide);
      train(session, 0, 3);
      const std::string file = save_checkpoint(session.engine, folder.path()) + "/manifest.json";
      EXPECT_THAT(load_checkpoint(session.engine, folder.path()).inexact, IsEmpty());
      std::ifstream text(file);
      auto manifest = read_manifest(file, std::string(std::istreambuf_iterator<char>(text), {}));
      ASSERT_TRUE(manifest.ok()) << manifest.status();
      manifest->noise_version = 1;
      std::ofstream(file, std::ios::trunc) << write_manifest(*manifest);
      const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder.path());
      ASSERT_EQ(loaded.inexact.size(), wanted.empty() ? 0u : 1u);
      if (!wanted.empty()) {
        EXPECT_THAT(loaded.inexact[0], AllOf(HasSubstr(wanted), HasSubstr("had version 1")));
      }
    });
  };
  Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
  expect_said(strategy, "");
  for (const StateDType state : {StateDType::kBF16, StateDType::k8Bit}) {
    Strategy narrow = strategy;
    narrow.optimizer.state_dtype = state;
    EXPECT_EQ(other_noise(narrow, 2).has_value(), state == StateDType::k8Bit);
    expect_said(narrow, "states will be rounded");
  }
  strategy.compression.method = RandomKConfig{.fraction = 0.5};
  EXPECT_THAT(other_noise(strategy, 1).value_or(""), HasSubstr("of gradients other ones"));
  EXPECT_EQ(other_noise(strategy, 2), std::nullopt);
  EXPECT_EQ(other_noise(strategy, kNoiseVersion), std::nullopt);
}

/// Changes the manifest of `checkpoint` into that of a run with the defaults of version 0.1.
void date_back(const std::string& checkpoint) {
  const std::string file = checkpoint + "/manifest.json";
  std::ifstream text(file);
  auto manifest = read_manifest(file, std::string(std::istreambuf_iterator<char>(text), {}));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->defaults_version, OptimizerConfig::kDefaultsVersion);
  manifest->defaults_version = 1;
  std::ofstream(file, std::ios::trunc) << write_manifest(*manifest);
}

/// Returns the defaults that every rule had in version 0.1.
OptimizerConfig of_adamw(OptimizerType type) {
  OptimizerConfig config{
      .type = type, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .momentum = 0.0};
  config.muon.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW;
  return config;
}

TEST(Checkpoint, OptionsMissingInTheStrategyComeFromTheSavedRun) {
  for (const OptimizerType type : {OptimizerType::kAdagrad, OptimizerType::kMuon}) {
    const TestFolder folder, later;
    std::string saved, saved_later;
    Steps wanted;
    const auto run = [](const OptimizerConfig& optimizer, const auto& body) {
      const auto adjust = [&](Strategy& s) { s.optimizer = optimizer; };
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), kWide);
        body(session, mesh.rank() == 0);
      });
    };
    run(of_adamw(type), [&](Session& session, bool is_first) {
      train(session, 0, 3);
      const std::string path = save_checkpoint(session.engine, folder.path());
      Steps steps = train(session, 3, 6);
      if (is_first) saved = path, wanted = std::move(steps);
    });
    run({.type = type}, [&](Session& session, bool is_first) {
      load_checkpoint(session.engine, saved);
      const Steps steps = train(session, 3, 6);
      if (!is_first) return;
      EXPECT_FALSE(all_same_bits(steps.values, wanted.values)) << name_of(type);
    });
    date_back(saved);
    run({.type = type}, [&](Session& session, bool is_first) {
      load_checkpoint(session.engine, saved);
      const std::string path = save_checkpoint(session.engine, later.path());
      const Steps steps = train(session, 3, 6);
      if (is_first) saved_later = path, expect_same(steps, wanted, name_of(type));
    });
    run({.type = type}, [&](Session& session, bool is_first) {
      load_checkpoint(session.engine, saved_later);
      const Steps steps = train(session, 3, 6);
      if (is_first) expect_same(steps, wanted, name_of(type) + ", from a checkpoint that this version saved");
    });
    run({.type = type, .lr = 2e-3}, [&](Session& session, bool) {
      load_checkpoint(session.engine, saved);
      EXPECT_EQ(session.engine.lr(), 2e-3) << "a number that the strategy gives";
      EXPECT_EQ(session.engine.strategy().optimizer.weight_decay, 0.01);
    });
  }
}

// tests/engine/files/frozen_states_test.cc tests parameters that trained before they were frozen.
TEST(Checkpoint, NeverTrainedParameterStartsWithZeroStatesAndSaysSo) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    TinyOptions options = kWide;
    options.frozen_first_block = true;
    Session frozen(mesh, strategy_for(ShardingStrategy::kFullShard), options);
    train(frozen, 0, 3);
    save_checkpoint(frozen.engine, folder.path());
    Session thawed(mesh, strategy_for(ShardingStrategy::kFullShard), kWide);
    train(thawed, 0, 2);  // the load must set its states back to zeros
    const LoadedCheckpoint loaded = load_checkpoint(thawed.engine, folder.path());
    ASSERT_EQ(loaded.inexact.size(), 1u);
    EXPECT_THAT(loaded.inexact[0], AllOf(HasSubstr("states of zeros"), HasSubstr("blocks.0.up.weight")));
    EXPECT_TRUE(all_same_bits(thawed.values(), frozen.values()));
    const std::string path = save_checkpoint(thawed.engine, folder.path());
    if (mesh.rank() != 0) return;
    const std::string zeros = tensors_of(path).at("exp_avg|blocks.0.up.weight");
    EXPECT_EQ(zeros, std::string(zeros.size(), '\0'));
  });
}

TEST(Checkpoint, ItemsAndCursorComeBackOnEveryRank) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    CheckpointItems items;
    items.tensors["ema"] = at::full({3, 2}, 1.5 + mesh.rank(), at::kDouble).t();
    items.tensors["none"] = at::full({0}, 1.0);
    items.tensors["one"] = at::full({}, 7, at::kLong);
    items.json["best"] = R"({"loss": 1.25, "at": [1, 2]})";
    items.data = SamplerCursor{2, 400, 1000, 0xffffffffffffffffu, false};
    save_checkpoint(session.engine, folder.path(), items);
    const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder.path());
    EXPECT_TRUE(loaded.items.tensors.at("ema").equal(at::full({2, 3}, 1.5, at::kDouble)));
    EXPECT_EQ(loaded.items.tensors.at("none").numel(), 0);
    EXPECT_EQ(loaded.items.tensors.at("one").item<std::int64_t>(), 7);
    EXPECT_EQ(loaded.items.json, items.json);
    EXPECT_EQ(loaded.items.data, items.data);
  });
}

TEST(Checkpoint, OnlyTheNewestCheckpointsAreKept) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    for (std::size_t i = 0; i < 4; ++i) {
      session.train(i);
      save_checkpoint(session.engine, folder.path(), {}, {.keep = 2});
    }
  });
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"latest", "lock", "step-000000000003", "step-000000000004"}));
}

/// Returns the error that both ranks get when they load. Checks that nothing has changed, and that training continues.
std::string refusal_of(const std::string& path, const TinyOptions& model, const Adjust& adjust, ExitCode code) {
  std::string texts[2];
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), model);
    train(session, 0, 1);
    const Values before = session.values();
    try {
      load_checkpoint(session.engine, path);
      ADD_FAILURE() << "loaded " << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), code) << error.message();
      texts[mesh.rank()] = error.message();
    }
    EXPECT_TRUE(all_same_bits(session.values(), before));
    train(session, 1, 2);
  });
  EXPECT_EQ(texts[0], texts[1]);
  return texts[0];
}

TEST(Checkpoint, CheckpointOfAnotherModelIsRefusedWithAllNames) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    save_checkpoint(session.engine, folder.path());
  });
  const auto refusal = [&](const TinyOptions& model, const Adjust& adjust = nullptr) {
    return refusal_of(folder.path(), model, adjust, ExitCode::kCorruptData);
  };
  EXPECT_THAT(refusal({.vocab = 19, .width = 12, .hidden = 32}),
              AllOf(HasSubstr("\"blocks.0.up.weight\": the model wants [32, 12], the checkpoint has [31, 12]"),
                    HasSubstr("blocks.2.down.weight")));
  EXPECT_THAT(refusal({.blocks = 2}), HasSubstr("\"blocks.2.up.weight\" of the checkpoint is not in the model"));
  EXPECT_THAT(refusal({.blocks = 4}), HasSubstr("\"blocks.3.up.weight\" of the model is not in the checkpoint"));
  EXPECT_THAT(refusal({.tied_head = true}), HasSubstr("ties it to [embedding.weight], the checkpoint to []"));
  EXPECT_THAT(refusal({}, [](Strategy& s) { s.optimizer.type = OptimizerType::kSgd, s.optimizer.momentum = 0.9; }),
              AllOf(HasSubstr("\"momentum_buffer\""), HasSubstr("\"exp_avg\", \"exp_avg_sq\""), HasSubstr("hint:")));
  EXPECT_THAT(refusal({}, [](Strategy& s) { s.optimizer.state_dtype = StateDType::k8Bit; }),
              AllOf(HasSubstr("is fp32 in the checkpoint"), HasSubstr("wants 8bit")));
}

struct OneLayer : torch::nn::Module {
  explicit OneLayer(const std::string& name) { register_module(name, torch::nn::Linear(3, 5)); }
};

TEST(Checkpoint, MissingNameSuggestsTheNearest) {
  const TestFolder folder;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Strategy strategy;
    strategy.strategy = ShardingStrategy::kNoShard;
    Engine saved(std::make_shared<OneLayer>("projection"), strategy, mesh);
    save_checkpoint(saved, folder.path());
    Engine engine(std::make_shared<OneLayer>("projektion"), strategy, mesh);
    EXPECT_THAT(error_of(ExitCode::kCorruptData, [&] { load_checkpoint(engine, folder.path()); }),
                AllOf(HasSubstr("\"projektion.bias\" of the model is not in the checkpoint. [T0426] "
                                "hint: did you mean \"projection.bias\"?"),
                      HasSubstr("\"projection.bias\" of the checkpoint is not in the model. [T0426] "
                                "hint: did you mean \"projektion.bias\"?")));
  });
}

// Fault F32 (docs/faults.md): an extra file in the folder of a checkpoint is ignored, and removed with the checkpoint.
TEST(Checkpoint, ExtraFileInTheFolderIsIgnored) {
  const TestFolder folder;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    const std::string path = save_checkpoint(session.engine, folder.path());
    for (const char* name : {"rank-00001.safetensors", "notes.txt", ".tmp-manifest.json"})
      std::ofstream(path + "/" + name) << "nothing of this checkpoint";
    const Values before = session.values();
    session.train(0);
    load_checkpoint(session.engine, folder.path());
    EXPECT_TRUE(all_same_bits(session.values(), before));
    EXPECT_TRUE(fs::exists(path + "/notes.txt"));
    session.train(0);
    save_checkpoint(session.engine, folder.path(), {}, {.keep = 1});
    EXPECT_FALSE(fs::exists(path));
    finish_checkpoint(session.engine);
    EXPECT_THAT(names_in(folder.path()), ::testing::SizeIs(3));  // the folder has `latest`, `lock` and the checkpoint
  });
}

TEST(Checkpoint, MissingCheckpointIsNamed) {
  const TestFolder folder;
  EXPECT_THAT(refusal_of(folder / "nowhere", {}, nullptr, ExitCode::kNoInput), HasSubstr("nowhere"));
  EXPECT_THAT(refusal_of(folder.path(), {}, nullptr, ExitCode::kNoInput), HasSubstr("latest"));
}

// Faults F30 and F31 (docs/faults.md): all ranks learn of damage, even if only one rank finds it.
TEST(Checkpoint, DamageIsFoundBeforeAnythingChanges) {
  const TestFolder folder;
  const std::string path = of_rank_zero({.ranks = 3}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    return save_checkpoint(session.engine, folder.path());
  });
  for (const char* name :
       {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"}) {
    const std::string file = path + "/" + name, bytes = TestFolder::content_of(file);
    for (const std::size_t place : {std::size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
      std::string changed = bytes;
      changed[place] = static_cast<char>(changed[place] ^ 1);
      std::ofstream(file, std::ios::binary) << changed;
      EXPECT_THAT(refusal_of(folder.path(), {}, nullptr, ExitCode::kCorruptData), HasSubstr(name));
    }
    std::ofstream(file, std::ios::binary) << bytes.substr(0, bytes.size() - 1);
    EXPECT_THAT(refusal_of(folder.path(), {}, nullptr, ExitCode::kCorruptData), HasSubstr(name));
    fs::remove(file);
    EXPECT_THAT(refusal_of(path, {}, nullptr, ExitCode::kNoInput),
                HasSubstr(name == std::string("manifest.json") ? "latest" : name));
    std::ofstream(file, std::ios::binary) << bytes;
  }
}

TEST(Checkpoint, CallsOutOfTurnAreRefused) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) { s.ema.decay = 0.9; }));
    const auto refused = [&](const char* text) {
      for (const auto& call : {std::function<void()>([&] { save_checkpoint(session.engine, folder.path()); }),
                               std::function<void()>([&] { load_checkpoint(session.engine, folder.path()); })}) {
        EXPECT_THAT(usage_error_of(call), HasSubstr(text));
      }
    };
    session.engine.backward(session.loss(0));
    refused("between backward and step");
    session.engine.step();
    {
      const Gathered guard(session.engine);
      refused("under a Gathered guard");
    }
    const EmaWeights average(session.engine);
    refused("under EmaWeights");
  });
}

// Faults F22 and F23 (docs/faults.md): each file operation of a save by two ranks fails once. All ranks get the same
// error, the previous checkpoint stays the latest, nothing is left over, and training continues.
TEST(Checkpoint, EveryFailedOperationOfASaveIsAnErrorOnAllRanks) {
  for (const FaultSite site :
       {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename, FaultSite::kMkdir}) {
    std::int64_t n = 1;
    for (bool hit = true; hit; ++n) {
      const TestFolder folder;
      std::string texts[2];
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
        session.train(0);
        save_checkpoint(session.engine, folder.path());
        session.train(1);
        {
          static std::atomic<ScopedFaults*> faults{nullptr};
          if (mesh.rank() == 0)
            faults = new ScopedFaults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = ENOSPC}});
          const Values meet = session.values();  // the fault plan is installed before any rank begins to save
          try {
            save_checkpoint(session.engine, folder.path());
          } catch (const Error& error) {
            texts[mesh.rank()] = error.message();
          }
          const Values meet_again = session.values();
          if (mesh.rank() == 0) {
            hit = faults.load()->plan().faults() > 0;
            delete faults.exchange(nullptr);
          }
        }
        session.train(2);
        const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder.path());
        EXPECT_TRUE(loaded.step == 1 || loaded.step == 2);
        if (texts[mesh.rank()].empty()) {
          EXPECT_EQ(loaded.step, 2);
        }
      });
      EXPECT_EQ(texts[0], texts[1]);
      EXPECT_EQ(texts[0].empty(), !hit) << static_cast<int>(site) << " " << n << " " << texts[0];
      if (hit) {
        EXPECT_THAT(texts[0], AllOf(HasSubstr("rank "), HasSubstr(folder.path().string()), HasSubstr("errno 28")));
      }
      for (const std::string& name : names_in(folder.path())) EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
    }
    EXPECT_GT(n, 2) << static_cast<int>(site);
  }
}

/// A model that is larger than the cache of SavedCheckpoint.
constexpr TinyOptions kLarge{.vocab = 40000, .width = 12, .hidden = 31, .blocks = 1};

// Fault F24 (docs/faults.md): each read of a file in a load fails once (only every second read, unless tests are long).
// Either the error changes nothing, or it says that the load has changed something. Only another load repairs the
// state in the second case.
TEST(Checkpoint, EveryFailedReadOfALoadIsAnErrorOnAllRanks) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard), kLarge);
    train(session, 0, 2);
    save_checkpoint(session.engine, folder.path());
  });
  for (const auto& [action, number] :
       {std::pair(FaultAction::kErrno, EIO), std::pair(FaultAction::kBitFlip, 1), std::pair(FaultAction::kTorn, 0)}) {
    std::int64_t n = 1;
    bool half_loaded = false;
    for (bool hit = true; hit; ++n) {
      if (!tests_are_long() && n % 2 == static_cast<int>(action) % 2) continue;
      std::string texts[2];
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard), kLarge);
        train(session, 0, 1);
        const Values before = session.values();
        static std::atomic<ScopedFaults*> faults{nullptr};
        if (mesh.rank() == 0)
          faults = new ScopedFaults({{.site = FaultSite::kRead, .nth = n, .action = action, .number = number}});
        const Values meet = session.values();
        try {
          load_checkpoint(session.engine, folder.path());
        } catch (const Error& error) {
          texts[mesh.rank()] = error.message();
        }
        const Values after = session.values();
        if (mesh.rank() == 0) {
          hit = faults.load()->plan().faults() > 0;
          delete faults.exchange(nullptr);
        }
        const std::string& text = texts[mesh.rank()];
        if (text.empty()) return;
        if (text.find("is not as it was") == std::string::npos) {
          EXPECT_TRUE(all_same_bits(after, before)) << text;
          return;
        }
        half_loaded = true;
        EXPECT_THROW(session.engine.backward(session.loss(1)), Error);
        EXPECT_THROW(save_checkpoint(session.engine, folder.path()), Error);
        load_checkpoint(session.engine, folder.path());
        train(session, 2, 3);
      });
      EXPECT_EQ(texts[0], texts[1]);
      EXPECT_EQ(texts[0].empty(), !hit) << n << " " << texts[0];
      if (hit) {
        EXPECT_THAT(texts[0], AllOf(HasSubstr("rank "), HasSubstr(folder.path().string())));
      }
    }
    EXPECT_GT(n, 5);
    EXPECT_TRUE(half_loaded);
  }
}

}  // namespace checkpoint_test
}  // namespace tessera::testing
