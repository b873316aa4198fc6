// Tests the states of frozen parameters in checkpoints and commits. A run that is saved while parameters are frozen
// continues, when they train again, like a run that was not interrupted.

#include "engine/memory/frozen_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "checkpoint/saved_checkpoint.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/durable_runs.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace frozen_states_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

const std::string kFrozen = "blocks.0.*";

/// Returns everything that a checkpoint holds about parameters: every byte, and the number of their updates.
std::map<std::string, std::string> saved_in(const std::string& path) {
  auto checkpoint = SavedCheckpoint::open(path, "test");
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::map<std::string, std::string> saved = tensors_of(path);
  for (const SavedParameter& parameter : (*checkpoint)->manifest().parameters)
    saved["updates|" + parameter.name] = std::to_string(parameter.updates);
  return saved;
}

void freeze(Session& session) { session.engine.set_trainable(kFrozen, false); }
void thaw(Session& session) { session.engine.set_trainable(kFrozen, true); }
void train(Session& session, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) session.train(i);
}

/// Trains the rest of a run that was saved after step 3 while the first block was frozen. The block trains again after
/// step 4.
Values rest_of(Session& session) {
  train(session, 3, 4);
  thaw(session);
  train(session, 4, 6);
  return session.values();
}

/// Lets two runs continue from the checkpoint. One freezes parameters before it loads, the other one after it has
/// loaded. Both have trained something else before the load.
void expect_goes_on_when_it_trains_again(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                                         const std::string& what) {
  Session first(mesh, strategy, kWide);
  train(first, 0, 2);
  freeze(first);
  train(first, 2, 3);
  const std::string path = save_checkpoint(first.engine, folder);
  const Values wanted = rest_of(first);
  finish_checkpoint(first.engine);
  for (const bool freezes_first : {true, false}) {
    Session second(mesh, strategy, kWide);
    train(second, 4, 5);
    if (freezes_first) freeze(second);
    const LoadedCheckpoint loaded = load_checkpoint(second.engine, path);
    if (freezes_first) {
      EXPECT_THAT(loaded.inexact, IsEmpty()) << what;
    } else {
      freeze(second);
    }
    EXPECT_TRUE(all_same_bits(rest_of(second), wanted)) << what << (freezes_first ? "" : ", frozen after the load");
  }
}

TEST(FrozenStates, ResumedRunHasTheSameBitsWhenTheyTrainAgain) {
  const int kRanks[] = {1, 2, 3};
  for (const auto& [kept, placed, ranks] : pairwise_of(sampled_kept(), kOnePerPlacement, kRanks)) {
    const TestFolder folder;
    const std::string what = name_of(kept) + ", " + name_of(placed);
    const Strategy strategy = strategy_of(kept, placed);
    run_ranks({.ranks = ranks},
              [&](const Mesh& mesh) { expect_goes_on_when_it_trains_again(mesh, strategy, folder.path(), what); });
  }
}

TEST(FrozenStates, OtherRulesAndAsyncSavesResumeWithTheSameBits) {
  const std::pair<const char*, Adjust> kinds[] = {
      {"muon", [](Strategy& s) { s.optimizer.type = OptimizerType::kMuon; }},
      {"adafactor", [](Strategy& s) { s.optimizer.type = OptimizerType::kAdafactor; }},
      {"lamb", [](Strategy& s) { s.optimizer.type = OptimizerType::kLamb; }},
      {"sgd", [](Strategy& s) { s.optimizer.type = OptimizerType::kSgd, s.optimizer.momentum = 0.9; }},
      {"in backward", update_in_backward},
      {"average", [](Strategy& s) { s.ema.decay = 0.5; }},
      {"beside training", [](Strategy& s) { s.checkpoint.async = true; }}};
  for (const auto& [name, adjust] : kinds) {
    for (const bool shared : {false, true}) {
      const TestFolder folder;
      const Strategy strategy = strategy_for(Placed(ShardingStrategy::kFullShard, shared), adjust);
      const std::string what = name;
      run_ranks({.ranks = 2},
                [&](const Mesh& mesh) { expect_goes_on_when_it_trains_again(mesh, strategy, folder.path(), what); });
    }
  }
}

// Another number of ranks loads the checkpoint, saves it while parameters are frozen, and saves it when they train
// again.
TEST(FrozenStates, OtherNumbersOfRanksKeepEveryByte) {
  const Adjust kRules[] = {nullptr, [](Strategy& s) { s.optimizer.type = OptimizerType::kAdafactor; }};
  for (const Adjust& rule : kRules) {
    for (const Kept& kept : kKept) {
      const TestFolder folder;
      std::string saved;
      std::map<std::string, std::string> frozen, trainable;
      const auto strategy_on = [&](const Placed& placed) {
        Strategy strategy = strategy_of(kept, placed);
        if (!rule) return strategy;
        rule(strategy);
        strategy.optimizer.state_dtype = StateDType::kF32;
        return strategy;
      };
      const auto save_both = [&](Session& session, bool is_first) {
        const std::string path = save_checkpoint(session.engine, folder.path());
        thaw(session);
        const std::string later = save_checkpoint(session.engine, folder.path());
        if (session.mesh.rank() != 0) return;
        if (is_first) saved = path, frozen = saved_in(path), trainable = saved_in(later);
        EXPECT_EQ(saved_in(path), frozen) << name_of(kept);
        EXPECT_EQ(saved_in(later), trainable) << name_of(kept);
      };
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_on(ShardingStrategy::kFullShard), kWide);
        train(session, 0, 2);
        freeze(session);
        train(session, 2, 3);
        save_both(session, true);
      });
      for (const int ranks : {3, 1}) {
        run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
          Session session(mesh, strategy_on(ShardingStrategy::kShardGradOp), kWide);
          freeze(session);
          load_checkpoint(session.engine, saved);
          save_both(session, false);
        });
      }
    }
  }
}

// A parameter was saved before it was frozen, and is loaded into an Engine where it is frozen already. The parameter
// gets the saved states, and not the states that this Engine has stored for it.
TEST(FrozenStates, FrozenParameterGetsTheStatesItWasSavedWith) {
  for (const Kept& kept : sampled_kept()) {
    const TestFolder folder;
    const Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session first(mesh, strategy, kWide);
      train(first, 0, 3);
      save_checkpoint(first.engine, folder.path());
      freeze(first);
      const Values wanted = rest_of(first);
      Session second(mesh, strategy, kWide);
      train(second, 3, 5);
      freeze(second);
      EXPECT_THAT(load_checkpoint(second.engine, folder.path()).inexact, IsEmpty()) << name_of(kept);
      EXPECT_TRUE(all_same_bits(rest_of(second), wanted)) << name_of(kept);
    });
  }
}

// A program writes values while parameters are frozen, and training continues from these values.
TEST(FrozenStates, ValueWrittenWhileFrozenIsTheMasterAfterALoad) {
  for (const Kept& kept : {kKept[3], kKept[4]}) {
    const TestFolder folder;
    const Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session first(mesh, strategy, kWide);
      train(first, 0, 2);
      freeze(first);
      {
        const Gathered guard(first.engine, Gathered::kWrite);
        const torch::NoGradGuard no_grad;
        first.model->named_parameters()["blocks.0.up.weight"].narrow(0, 0, 5).fill_(0.25);
      }
      train(first, 2, 3);
      save_checkpoint(first.engine, folder.path());
      const Values wanted = rest_of(first);
      Session second(mesh, strategy, kWide);
      freeze(second);
      load_checkpoint(second.engine, folder.path());
      EXPECT_TRUE(all_same_bits(rest_of(second), wanted)) << name_of(kept);
    });
  }
}

// ---- Commits --------------------------------------------------------------------------------------------------------

/// Returns the files that commits share, and the times when they were written.
std::map<fs::path, fs::file_time_type> kept_files(const fs::path& folder) {
  std::map<fs::path, fs::file_time_type> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const bool is_kept = entry.path().filename().string().find(".kept-") != std::string::npos;
    if (is_kept) files[entry.path()] = entry.last_write_time();
  }
  return files;
}

/// Trains on two ranks without "durable". The first block is frozen after two steps. Returns the run's checkpoint of
/// step 3.
std::string saved_with_frozen_block(const Strategy& strategy, const TestFolder& folder) {
  return of_rank_zero({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, kWide);
    train(session, 0, 2);
    freeze(session);
    train(session, 2, 3);
    return save_checkpoint(session.engine, folder.path());
  });
}

constexpr TinyOptions kWideWithFrozenBlock{.vocab = 32, .width = 32, .hidden = 64, .frozen_first_block = true};

TEST(FrozenStates, CommitsHoldThemButWriteThemOnce) {
  for (const Kept& kept : sampled_kept()) {
    const TestFolder folder, commits;
    const Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard);
    const std::string saved = saved_with_frozen_block(strategy, folder);
    const Strategy durable = made_durable(strategy, commits.path());
    std::string before, after;
    for (const bool resumes : {false, true}) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, durable, kWideWithFrozenBlock);
        if (resumes) {
          ASSERT_EQ(resume_durable(session.engine)->step, 5);
        } else {
          load_checkpoint(session.engine, saved);
          train_durably(session, 3, 5);
          finish_commit(session.engine);
        }
        const std::string path = save_checkpoint(session.engine, folder.path());
        if (mesh.rank() == 0) (resumes ? after : before) = path;
      });
    }
    EXPECT_EQ(saved_in(after), saved_in(before)) << name_of(kept);
    EXPECT_GT(saved_in(after).count("exp_avg|blocks.0.up.weight"), 0u);
    const auto written = kept_files(commits.path());
    EXPECT_EQ(written.size(), 2u) << "one a rank";
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, durable, kWideWithFrozenBlock);
      resume_durable(session.engine);
      train_durably(session, 5, 7);
    });
    EXPECT_EQ(kept_files(commits.path()), written);
  }
}

TEST(FrozenStates, DamagedFileBesideCommitsIsAnErrorThatNamesIt) {
  const TestFolder folder, commits;
  const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  const std::string saved = saved_with_frozen_block(strategy, folder);
  const Strategy durable = made_durable(strategy, commits.path());
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, durable, kWideWithFrozenBlock);
    load_checkpoint(session.engine, saved);
    train_durably(session, 3, 5);
  });
  for (const auto& [file, time] : kept_files(commits.path())) {
    if (file.filename().string().starts_with("rank-00001"))
      std::ofstream(file, std::ios::binary | std::ios::app) << "x";
  }
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, durable, kWideWithFrozenBlock);
    EXPECT_THAT(error_of(ExitCode::kCorruptData, [&] { resume_durable(session.engine); }),
                AllOf(HasSubstr("rank 1"), HasSubstr(".kept-"), HasSubstr("damaged")));
  });
}

// ---- Another rule ---------------------------------------------------------------------------------------------------

// Muon has one state for a matrix, and AdamW has two for each element, so neither rule can use the states of the other.
TEST(FrozenStates, ParameterThatGetsAnotherRuleStartsWithNewStates) {
  for (const bool frozen_meanwhile : {false, true}) {
    const TestFolder folder;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(
          mesh,
          strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) { s.optimizer.type = OptimizerType::kMuon; }),
          kWide);
      train(session, 0, 2);
      if (frozen_meanwhile) freeze(session);
      session.engine.add_group({.match = {"blocks.0.up.weight"}, .type = OptimizerType::kAdamW});
      if (frozen_meanwhile) thaw(session);
      const std::string path = save_checkpoint(session.engine, folder.path());
      if (mesh.rank() != 0) return;
      const auto tensors = saved_in(path);
      for (const char* state : {"exp_avg", "exp_avg_sq"}) {
        const std::string bytes = tensors.at(std::string(state) + "|blocks.0.up.weight");
        EXPECT_EQ(bytes, std::string(bytes.size(), '\0')) << state;
      }
      EXPECT_EQ(tensors.at("updates|blocks.0.up.weight"), "0");
      EXPECT_EQ(tensors.at("updates|blocks.0.down.weight"), "2");
    });
  }
}

}  // namespace frozen_states_test
}  // namespace tessera::testing
