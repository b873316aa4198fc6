// Tests "durable". A run that ended at any moment continues from its last commit with the bits of a run that was not
// disturbed, on whichever tiers its state lies. A faulty commit is an error on all ranks, and never changes numbers.
// tests/app/durable_test.cc kills processes.

#include "tessera/durable.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "checkpoint/commit.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/noise.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tests/support/durable_runs.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace durable_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(Durable, RunResumesFromItsLastCommitWithTheSameBits) {
  const std::pair<TinyOptions, int> kRuns[] = {{kAwkward, 1}, {kAwkward, 2}, {kWide, 3}};
  for (const auto& [kept, run, placed] : pairwise_of(sampled_kept(), kRuns, kOnePerPlacement)) {
    const auto& [model, ranks] = run;
    const TestFolder folder;
    const std::string what = name_of(kept) + ", " + name_of(placed) + " on " + std::to_string(ranks) + " ranks";
    const TinyOptions& options = model;
    const Strategy strategy = strategy_of(kept, placed);
    run_ranks({.ranks = ranks},
              [&](const Mesh& mesh) { expect_goes_on(mesh, strategy, options, folder.path(), what); });
  }
}

TEST(Durable, RunWithStatesAndParametersOnDiskResumes) {
  constexpr Below kBelow[] = {{0, 1, 1, 4096, 0, 1}, {0, 0.5, 0.3, 4096, 16384, 3}};
  for (const auto& [below, placed, kept] : pairwise_of<2>(kBelow, kOnePerPlacement, sampled_kept())) {
    const TestFolder folder;
    const std::string what = name_of(kept) + ", " + name_of(placed);
    const Strategy strategy = strategy_of(kept, placed, &below);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) { expect_goes_on(mesh, strategy, kAwkward, folder.path(), what); });
  }
}

TEST(Durable, UpdatesInBackwardAndOtherRulesResume) {
  const Adjust kAdjusts[] = {
      [](Strategy& s) { update_in_backward(s); }, [](Strategy& s) { s.optimizer.type = OptimizerType::kMuon; },
      [](Strategy& s) { s.optimizer.type = OptimizerType::kLamb; },
      [](Strategy& s) { s.optimizer.type = OptimizerType::kAdafactor; }, [](Strategy& s) { s.ema.decay = 0.9; }};
  for (const auto& [adjust, placed] : pairwise_of<1>(kAdjusts, kInMemory)) {
    const TestFolder folder;
    const Strategy strategy = strategy_for(placed, adjust);
    const std::string what = name_of(placed);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) { expect_goes_on(mesh, strategy, kWide, folder.path(), what); });
  }
}

TEST(Durable, DiskUseEqualsThePlanAndFrozenWeightsAreWrittenOnce) {
  for (const Placed& placed : kOnePerPlacement) {
    const TestFolder folder, scratch;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = made_durable(strategy_of(kKept[3], placed, &kSomeBelow), folder.path());
      strategy.offload.paths = {scratch.path().string()};
      Session session(mesh, strategy, kAwkward);
      train_durably(session, 0, 3);
      const DiskUse disk = session.engine.plan().disk;
      std::int64_t there = 0;
      for (const fs::path& each : {folder.path(), scratch.path()}) {
        for (const auto& entry : fs::directory_iterator(each)) {
          const std::string name = entry.path().filename();
          const std::string rank = std::to_string(mesh.rank());
          const bool is_own = name.starts_with("rank-0000" + rank) || name.find("-rank-" + rank + ".") != name.npos;
          const bool has_records = name.find(".commit") == name.npos && name.find(".lock") == name.npos;
          if (is_own && has_records) there += static_cast<std::int64_t>(entry.file_size());
        }
      }
      EXPECT_EQ(there, disk.bytes + disk.durable_bytes) << name_of(placed);
      EXPECT_GT(disk.written_in_commit, 0);
    });
  }
}

// If a rank dies before its commit is written, the commits of the other ranks are one step ahead.
TEST(Durable, StepMissingOnSomeRanksIsGivenUp) {
  for (const Placed& placed : kOnePerPlacement) {
    const TestFolder folder;
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_of(kKept[2], placed, &kSomeBelow);
      const Values wanted = trained(mesh, strategy, 4, kWide);
      const Strategy durable = made_durable(strategy, folder.path());
      {
        Session session(mesh, durable, kWide);
        train_durably(session, 0, 3);
      }
      // The first step was committed twice, so the commit of step 3 has an even number (commit-0).
      if (mesh.rank() == 1) fs::remove(folder.path() / "rank-00001.commit-0");
      for (int again = 0; again < 2; ++again) {
        Session session(mesh, durable, kWide);
        const auto resumed = resume_durable(session.engine);
        ASSERT_TRUE(resumed.has_value());
        EXPECT_EQ(resumed->step, again == 0 ? 2 : 3) << name_of(placed);
        train_durably(session, again == 0 ? 2 : 3, again == 0 ? 3 : 4);
        const Values got = session.values();
        EXPECT_TRUE(again == 0 || all_same_bits(got, wanted)) << name_of(placed);
      }
    });
  }
}

// Each file operation of a commit fails once (short tests take every third write). All ranks get the same error. The
// next run resumes from the previous commit, or from the failed commit if that commit is on all disks.
TEST(Durable, FailedCommitIsAnErrorOnAllRanksAndLosesNothing) {
  const Placed placed(ShardingStrategy::kFullShard, /*shared=*/false, /*on_disk=*/true);
  const Strategy strategy = strategy_of(kKept[2], placed, &kSomeBelow);
  const Values wanted =  // all ranks end with the same values
      of_rank_zero({.ranks = 2}, [&](const Mesh& mesh) { return trained(mesh, strategy, 3); });
  for (const FaultSite site : {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename}) {
    std::int64_t n = 1;
    for (bool hit = true; hit; n += site == FaultSite::kWrite && !tests_are_long() ? 3 : 1) {
      const TestFolder folder;
      std::string texts[2];
      std::atomic<ScopedFaults*> faults{nullptr};
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        const auto rank = static_cast<std::size_t>(mesh.rank());
        const Strategy durable = made_durable(strategy, folder.path());
        {
          Session session(mesh, durable);
          train_durably(session, 0, 1);
          session.train(1);
          const Values all_have = session.values();  // no rank is in its step any more
          if (rank == 0)
            faults = new ScopedFaults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = ENOSPC}});
          const Values meet = session.values();  // the fault plan is installed before any rank begins to commit
          texts[rank] = error_of([&] {
            commit_durable(session.engine);
            finish_commit(session.engine);
          });
          if (texts[rank].empty()) const Values meet_again = session.values();
        }
      });
      hit = faults.load()->plan().faults() > 0;
      delete faults.exchange(nullptr);
      EXPECT_EQ(texts[0], texts[1]);
      EXPECT_EQ(texts[0].empty(), !hit) << static_cast<int>(site) << " " << n;
      EXPECT_THAT(hit ? texts[0] : "rank errno 28", AllOf(HasSubstr("rank "), HasSubstr("errno 28")));
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, made_durable(strategy, folder.path()));
        const auto resumed = resume_durable(session.engine);
        ASSERT_TRUE(resumed.has_value()) << static_cast<int>(site) << " " << n;
        EXPECT_EQ(resumed->step, hit ? 1 : 2);
        train_durably(session, static_cast<std::size_t>(resumed->step), 3);
        EXPECT_TRUE(all_same_bits(session.values(), wanted)) << static_cast<int>(site) << " " << n;
      });
    }
    EXPECT_GT(n, 2) << static_cast<int>(site);
  }
}

// The commit's last operation takes a second. Forward and backward continue meanwhile, and the update waits.
TEST(Durable, CommitRunsBesideTheNextStep) {
  const TestFolder folder;
  const fs::path changed = folder.path() / "rank-00000.commit-1";
  const ScopedFaults slow({{.site = FaultSite::kRename,
                            .path = "rank-00000.commit",
                            .nth = 3,
                            .action = FaultAction::kDelay,
                            .number = 1000}});
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path()));
    train_durably(session, 0, 1);
    const std::string first = TestFolder::content_of(changed);
    EXPECT_FALSE(first.empty());
    train_durably(session, 1, 2);
    session.engine.backward(session.loss(2));
    EXPECT_EQ(TestFolder::content_of(changed), first);
    session.engine.step();
    EXPECT_NE(TestFolder::content_of(changed), first);
  });
}

/// A change that a program may make while a commit is under way.
struct Change {
  const char* what;
  std::function<void(Session&, const fs::path&)> make;
  Adjust adjust = nullptr;
};

// The image is written slowly, record by record, so that it would show a change that did not wait for the commit.
TEST(Durable, ChangesOfTrainingStateWaitForTheCommitUnderWay) {
  const Change kChanges[] = {
      {"a step", [](Session& s, const fs::path&) { s.train(2); }},
      {"a step in backward", [](Session& s, const fs::path&) { s.train(2); },
       [](Strategy& s) { update_in_backward(s); }},
      {"Gathered(kWrite)",
       [](Session& s, const fs::path&) {
         const at::NoGradGuard no_grad;
         Gathered guard(s.engine, Gathered::kWrite);
         for (at::Tensor& parameter : s.model->parameters()) parameter.fill_(0.5);
         guard.close();
       }},
      {"averages", [](Session& s, const fs::path&) { EmaWeights(s.engine).close(); },
       [](Strategy& s) { s.ema.decay = 0.9; }},
      {"a load", [](Session& s, const fs::path& saved) { load_checkpoint(s.engine, saved / "checkpoint"); }},
      {"an import", [](Session& s, const fs::path& saved) { import_safetensors(s.engine, saved / "weights"); }}};
  const auto exists = [](const Placed& placed, const Change& change) { return !change.adjust || !placed.on_disk; };
  for (const auto& each : pairwise_where<1>(exists, kOnePerPlacement, kChanges)) {
    const Placed& placed = std::get<0>(each);
    const Change& change = std::get<1>(each);
    const TestFolder folder, saved;
    const ScopedFaults slow(
        {{.site = FaultSite::kCqe, .path = ".memory", .every = 1, .action = FaultAction::kDelay, .number = 5}});
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[2], placed, &kSomeBelow);
      if (change.adjust) change.adjust(strategy);
      const std::string what = std::string(change.what) + ", " + name_of(placed);
      const Values wanted = trained(mesh, strategy, 2, kWide);
      const Strategy durable = made_durable(strategy, folder.path());
      {
        Session session(mesh, durable, kWide);
        save_checkpoint(session.engine, saved.path() / "checkpoint");
        export_safetensors(session.engine, saved.path() / "weights");
        EXPECT_EQ(train_durably(session, 0, 2), 2);
        change.make(session, saved.path());
      }
      Session session(mesh, durable, kWide);
      const auto resumed = resume_durable(session.engine);
      ASSERT_TRUE(resumed.has_value()) << what;
      EXPECT_EQ(resumed->step, 2) << what;
      EXPECT_TRUE(all_same_bits(session.values(), wanted)) << what;
    });
  }
}

// The step that follows a failed commit is made before the next call reports the failure.
TEST(Durable, FailedCommitIsReportedByTheNextCallAndTrainingGoesOn) {
  const auto is_told = AllOf(HasSubstr("commit of step 2"), HasSubstr("rank 1"), HasSubstr("errno 28"));
  for (const bool finishes : {false, true}) {
    const TestFolder folder;
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    const ScopedFaults full({{.site = FaultSite::kRename,
                              .path = "rank-00001.commit",
                              .nth = 3,
                              .action = FaultAction::kErrno,
                              .number = ENOSPC}});
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, made_durable(strategy, folder.path()));
      EXPECT_EQ(train_durably(session, 0, 2), 2);
      if (!finishes) session.train(2);
      EXPECT_THAT(error_of([&] { finishes ? finish_commit(session.engine) : void(commit_durable(session.engine)); }),
                  is_told);
      if (finishes) session.train(2);
      EXPECT_EQ(train_durably(session, 3, 4), 1);
      EXPECT_EQ(error_of([&] { finish_commit(session.engine); }), "");
      EXPECT_TRUE(all_same_bits(session.values(), trained(mesh, strategy, 4)));
    });
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, made_durable(strategy, folder.path()));
      EXPECT_EQ(resume_durable(session.engine)->step, 4);
    });
  }
}

TEST(Durable, ItemsAndCursorComeBack) {
  const TestFolder folder;
  const SamplerCursor cursor{.epoch = 2, .consumed = 7, .num_samples = 9, .seed = ~std::uint64_t{0}, .shuffle = false};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    {
      Session session(mesh, strategy);
      session.train(0);
      CheckpointItems items{.tensors = {{"t", at::tensor({1.5, 2.5})}}, .json = {{"a", "{\"b\": 1}"}}, .data = cursor};
      EXPECT_TRUE(commit_durable(session.engine, items));
    }
    Session session(mesh, strategy);
    const auto resumed = resume_durable(session.engine);
    ASSERT_TRUE(resumed.has_value());
    EXPECT_EQ(resumed->items.data, cursor);
    EXPECT_EQ(resumed->items.json.at("a"), "{\"b\": 1}");
    EXPECT_TRUE(resumed->items.tensors.at("t").equal(at::tensor({1.5, 2.5})));
    EXPECT_EQ(resumed->path, folder.path().string());
  });
}

TEST(Durable, UnwritableItemsAreAnErrorOnAllRanksAndLoseNothing) {
  const TestFolder folder;
  CheckpointItems undefined, broken;
  undefined.tensors["t"] = at::Tensor();
  broken.json["a"] = "{\"b\": ";
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    std::size_t step = 0;
    {
      Session session(mesh, strategy);
      train_durably(session, step++, 1);
      for (const CheckpointItems& bad : {undefined, broken}) {
        session.train(step++);
        const CheckpointItems items = mesh.rank() == 1 ? bad : CheckpointItems{};
        EXPECT_THAT(error_of([&] { commit_durable(session.engine, items); }), HasSubstr("commit_durable: the item"));
      }
    }
    Session session(mesh, strategy);
    EXPECT_EQ(resume_durable(session.engine)->step, 1);
    train_durably(session, 1, 2);
  });
}

TEST(Durable, RankZerosItemsAreCommitted) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    {
      Session session(mesh, strategy);
      session.train(0);
      CheckpointItems items;
      if (mesh.rank() == 0) items.json["a"] = "7";
      commit_durable(session.engine, items);
    }
    Session session(mesh, strategy);
    EXPECT_EQ(resume_durable(session.engine)->items.json.at("a"), "7");
  });
}

/// Trains on two ranks. The run leaves some commits in `folder`.
void leave_commits(const fs::path& folder, const Placed& placed = ShardingStrategy::kFullShard,
                   std::size_t commits = 3) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, made_durable(strategy_for(placed), folder));
    train_durably(session, 0, commits);
  });
}

/// Returns the error of rank 0. An Engine's constructor throws it, or else resume_durable does.
std::string refusal_of(int ranks, const Strategy& strategy, const fs::path& folder, const TinyOptions& model = {}) {
  std::string text;
  std::string* const told = &text;
  run_ranks({.ranks = ranks}, [&, told](const Mesh& mesh) {
    const std::string own = error_of([&] {
      Session session(mesh, made_durable(strategy, folder), model);
      resume_durable(session.engine);
    });
    if (mesh.rank() == 0) *told = own;
  });
  return text;
}

TEST(Durable, CommitsOfAnotherRunAreRefusedAndKept) {
  const TestFolder folder;
  leave_commits(folder.path());
  const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  Strategy lion = strategy;
  lion.optimizer.type = OptimizerType::kLion;
  const auto another = AllOf(HasSubstr("holds step 3"), HasSubstr("2 ranks"), HasSubstr("hint:"));
  EXPECT_THAT(refusal_of(1, strategy, folder.path()), another);
  EXPECT_THAT(refusal_of(2, strategy, folder.path(), {.width = 16}), another);
  EXPECT_THAT(refusal_of(2, strategy_for(ShardingStrategy::kNoShard), folder.path()), another);
  EXPECT_THAT(refusal_of(2, lion, folder.path()), another);
  EXPECT_THAT(refusal_of(3, strategy, folder.path()),
              AllOf(HasSubstr("rank 0 has step 2 and 3"), HasSubstr("rank 2 has none"), HasSubstr("hint:")));
  EXPECT_EQ(refusal_of(2, strategy, folder.path()), "");
}

// A single first commit looks like one that was being written when its run was killed. So a run makes its first commit
// twice, and the next run does not forget it.
TEST(Durable, RunWithASingleCommitIsNotOverwritten) {
  const TestFolder folder;
  leave_commits(folder.path(), ShardingStrategy::kFullShard, 1);
  const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  EXPECT_THAT(refusal_of(3, strategy, folder.path()),
              AllOf(HasSubstr("rank 1 has step 1 and 1"), HasSubstr("rank 2 has none")));
  const fs::path elsewhere = folder.path() / "elsewhere";
  fs::create_directory(elsewhere);
  for (const char* name : {"rank-00001.commit-0", "rank-00001.commit-1"})
    fs::rename(folder.path() / name, elsewhere / name);
  EXPECT_THAT(refusal_of(2, strategy, folder.path()), AllOf(HasSubstr("rank 1"), HasSubstr("commit-1 are missing")));
  fs::rename(folder.path() / "rank-00001.begun", elsewhere / "rank-00001.begun");  // `elsewhere` is another disk
  EXPECT_THAT(refusal_of(2, strategy, folder.path()), HasSubstr("there is no step that all ranks hold"));
  fs::rename(folder.path() / "rank-00000.commit-0", elsewhere / "rank-00000.commit-0");
  EXPECT_THAT(refusal_of(2, strategy, folder.path()), HasSubstr("there is no step that all ranks hold"));
  fs::rename(elsewhere / "rank-00000.commit-0", folder.path() / "rank-00000.commit-0");
  fs::rename(elsewhere / "rank-00001.begun", folder.path() / "rank-00001.begun");
  for (const char* name : {"rank-00001.commit-0", "rank-00001.commit-1"})
    fs::rename(elsewhere / name, folder.path() / name);
  EXPECT_EQ(refusal_of(2, strategy, folder.path()), "");
}

TEST(Durable, OtherNoiseVersionIsReportedWhereItMatters) {
  for (const StateDType state : {StateDType::kF32, StateDType::kBF16}) {
    const TestFolder folder;
    Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    strategy.optimizer.state_dtype = state;
    const auto resume = [&](std::size_t wanted) {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Session session(mesh, strategy);
        const auto resumed = resume_durable(session.engine);
        if (resumed) {
          EXPECT_EQ(resumed->inexact.size(), wanted);
        }
        session.train(0);
        commit_durable(session.engine);
      });
    };
    resume(0);
    resume(0);
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      if (entry.path().filename().string().find(".commit-") == std::string::npos) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      auto commit = read_commit(entry.path(), std::string(std::istreambuf_iterator<char>(file), {}));
      ASSERT_TRUE(commit.ok()) << commit.status();
      const std::string version = std::to_string(kNoiseVersion), has = "\"noise\":" + version;
      for (auto& [name, bytes] : commit->parts) {
        if (const auto at = bytes.find(has); at != bytes.npos) bytes.replace(at, has.size(), "\"older\":" + version);
      }
      std::ofstream(entry.path(), std::ios::binary | std::ios::trunc) << write_commit(*commit);
    }
    resume(state == StateDType::kF32 ? 0 : 1);
  }
}

TEST(Durable, ResumedRatesAreTheStrategysUnlessSetByHand) {
  const auto run = [](const Mesh& mesh, const fs::path& folder, LrScheduleType schedule, double lr, bool has_groups) {
    Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder);
    strategy.lr_schedule.type = schedule;
    strategy.optimizer.lr = lr;
    if (has_groups) strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1}};
    Session session(mesh, strategy);
    const auto resumed = resume_durable(session.engine);
    if (!resumed && schedule == LrScheduleType::kManual) session.engine.set_lr(0.25);
    const double rate = session.train(0).lr;
    commit_durable(session.engine);
    return std::pair(rate, resumed ? resumed->inexact.size() : 0);
  };
  const TestFolder by_schedule, by_hand;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    EXPECT_EQ(run(mesh, by_schedule.path(), LrScheduleType::kConstant, 0.5, false), std::pair(0.5, std::size_t{0}));
    EXPECT_EQ(run(mesh, by_schedule.path(), LrScheduleType::kConstant, 0.125, true), std::pair(0.125, std::size_t{0}));
    EXPECT_EQ(run(mesh, by_hand.path(), LrScheduleType::kManual, 0.5, false), std::pair(0.25, std::size_t{0}));
    EXPECT_EQ(run(mesh, by_hand.path(), LrScheduleType::kManual, 0.5, false), std::pair(0.25, std::size_t{0}));
    EXPECT_EQ(run(mesh, by_hand.path(), LrScheduleType::kManual, 0.5, true), std::pair(0.5, std::size_t{1}));
  });
}

TEST(Durable, UnresumedRunDoesNotReplaceACommit) {
  const TestFolder folder;
  leave_commits(folder.path());
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    Session session(mesh, strategy);
    session.train(0);
    EXPECT_THAT(usage_error_of([&] { commit_durable(session.engine); }),
                AllOf(HasSubstr("holds step 3"), HasSubstr("resume_durable"), HasSubstr("hint:")));
    EXPECT_EQ(resume_durable(session.engine)->step, 3);  // the steps since then have overwritten nothing of the commit
    EXPECT_THAT(usage_error_of([&] { resume_durable(session.engine); }), HasSubstr("twice"));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_trainable("*", false); }), HasSubstr("durable"));
    train_durably(session, 3, 4);
  });
}

TEST(Durable, CallsOutOfTurnAreRefused) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session without(mesh, strategy_for(ShardingStrategy::kFullShard));
    EXPECT_THAT(usage_error_of([&] { commit_durable(without.engine); }), HasSubstr("durable.every"));
    EXPECT_THAT(usage_error_of([&] { resume_durable(without.engine); }), HasSubstr("durable.every"));
    Session session(mesh, made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path()));
    session.engine.backward(session.loss(0));
    EXPECT_THAT(usage_error_of([&] { commit_durable(session.engine); }), HasSubstr("zero_grad"));
    session.engine.zero_grad();
    EXPECT_FALSE(commit_durable(session.engine));
  });
}

void flip_a_bit(const fs::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(at);
  file.put(byte);
}

// One record is damaged in both of its places. The last commit uses one of these places.
TEST(Durable, DamagedFileIsAnErrorThatNamesIt) {
  const Placed on_disk(ShardingStrategy::kFullShard, /*shared=*/false, /*on_disk=*/true);
  const TestFolder folder;
  leave_commits(folder.path(), on_disk);
  const fs::path image = folder.path() / "rank-00001.memory";
  flip_a_bit(image, 5);
  flip_a_bit(image, static_cast<std::streamoff>(fs::file_size(image) / 2) + 5);
  EXPECT_THAT(refusal_of(2, strategy_for(on_disk), folder.path()),
              AllOf(HasSubstr("rank 1"), HasSubstr("rank-00001.memory"), HasSubstr("checksum"), HasSubstr("hint:")));
}

/// Returns the contents of all files, except those that say which process holds a folder.
std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".lock")
      contents[entry.path().filename().string()] = TestFolder::content_of(entry.path());
  }
  return contents;
}

// A run whose commits are lost is not treated like a run before its first commit.
TEST(Durable, FolderWithoutAWholeCommitIsAnErrorAndStaysUntouched) {
  const auto emptied = [](const fs::path& file) { fs::resize_file(file, 0); };
  const auto changed = [](const fs::path& file) { flip_a_bit(file, 30); };
  const auto removed = [](const fs::path& file) { fs::remove(file); };
  const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  for (const std::function<void(const fs::path&)>& damage :
       {std::function<void(const fs::path&)>(emptied), std::function<void(const fs::path&)>(changed),
        std::function<void(const fs::path&)>(removed)}) {
    for (const bool on_all : {false, true}) {
      const TestFolder folder;
      leave_commits(folder.path());
      folder.write("rank-00001.commit-1.tmp-4711-0", "what a kill left");
      for (const char* rank : {"rank-00001", "rank-00000"}) {
        if (!on_all && rank != std::string("rank-00001")) continue;
        for (const char* which : {".commit-0", ".commit-1"}) damage(folder.path() / (std::string(rank) + which));
      }
      const auto before = contents_of(folder.path());
      EXPECT_THAT(refusal_of(2, strategy, folder.path()),
                  AllOf(HasSubstr(on_all ? "rank 0" : "rank 1"), HasSubstr("no whole commit"), HasSubstr("hint:")));
      EXPECT_EQ(contents_of(folder.path()), before);
    }
  }
}

// Hosts that have changed places, or a run of fewer ranks on what was another rank's disk.
TEST(Durable, FolderWithCommitsOfOtherRanksAloneIsAnErrorAndStaysUntouched) {
  const TestFolder folder, elsewhere;
  leave_commits(folder.path());
  std::vector<fs::path> of_rank_zero;
  for (const auto& entry : fs::directory_iterator(folder.path()))
    if (entry.path().filename().string().starts_with("rank-00000")) of_rank_zero.push_back(entry.path());
  for (const fs::path& file : of_rank_zero) fs::rename(file, elsewhere.path() / file.filename());
  const auto before = contents_of(folder.path());
  EXPECT_THAT(refusal_of(1, strategy_for(ShardingStrategy::kFullShard), folder.path()),
              AllOf(HasSubstr("rank 0 has none, beside commits of rank 1"), HasSubstr("hint:")));
  EXPECT_EQ(contents_of(folder.path()), before);
}

TEST(Durable, RunThatEndedBeforeItsFirstCommitBeginsAgain) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    for (int run = 0; run < 2; ++run) {
      Session session(mesh, made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path()));
      EXPECT_FALSE(resume_durable(session.engine).has_value());
      session.train(0);
    }
  });
}

TEST(Durable, MissingFileIsAnErrorAndTheOthersStay) {
  const TestFolder folder;
  leave_commits(folder.path());
  const fs::path image = folder.path() / "rank-00001.memory", elsewhere = folder.path() / "elsewhere";
  const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  fs::rename(image, elsewhere);
  EXPECT_THAT(refusal_of(2, strategy, folder.path()), AllOf(HasSubstr("rank-00001.memory"), HasSubstr("is missing")));
  std::ofstream(image) << "short";
  EXPECT_THAT(refusal_of(2, strategy, folder.path()), AllOf(HasSubstr("rank-00001.memory"), HasSubstr("has 5 bytes")));
  EXPECT_EQ(fs::file_size(image), 5u);
  fs::rename(elsewhere, image);
  EXPECT_EQ(refusal_of(2, strategy, folder.path()), "");
}

TEST(Durable, SecondRunInTheSameFolderIsRefused) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = made_durable(strategy_for(ShardingStrategy::kFullShard), folder.path());
    Session first(mesh, strategy);
    EXPECT_THAT(error_of([&] { Session second(mesh, strategy); }),
                AllOf(HasSubstr("another process"), HasSubstr(folder.path().string()), HasSubstr("hint:")));
  });
}

}  // namespace durable_test
}  // namespace tessera::testing
