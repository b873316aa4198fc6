// Tests "checkpoint": {"async": true}. A thread writes the files while training continues, and other saves make
// training wait. A save that failed is an error of the next step on all ranks. Training can continue after that error.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <utility>

#include "offload/files/fault_plan.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tests/support/limits/patience.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace async_checkpoint_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

void save_beside_training(Strategy& strategy) { strategy.checkpoint.async = true; }

/// Returns the shards' contents by file name.
std::map<std::string, std::string> shards_in(const std::string& checkpoint) {
  std::map<std::string, std::string> shards;
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() == ".safetensors")
      shards[entry.path().filename()] = TestFolder::content_of(entry.path());
  }
  return shards;
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// The path of a checkpoint, and the values at the end of the run that saved it.
struct Saved {
  std::string path;
  Values values;
};
/// Trains three steps, saves, and trains three more. `saved` gets the path and the values of rank 0.
void train_save_train(const Mesh& mesh, const Strategy& strategy, const TinyOptions& model, const fs::path& folder,
                      Saved& saved) {
  Session session(mesh, strategy, model);
  for (std::size_t i = 0; i < 3; ++i) session.train(i);
  const std::string path = save_checkpoint(session.engine, folder);
  for (std::size_t i = 3; i < 6; ++i) session.train(i);
  finish_checkpoint(session.engine);
  EXPECT_FALSE(checkpoint_progress(session.engine).has_value());
  const Values values = session.values();
  if (mesh.rank() == 0) saved = {path, values};
}

void expect_alike(int ranks, Strategy strategy, const TinyOptions& model, const std::string& what) {
  const TestFolder waiting, beside;
  Saved wanted, got;
  run_ranks({.ranks = ranks},
            [&](const Mesh& mesh) { train_save_train(mesh, strategy, model, waiting.path(), wanted); });
  save_beside_training(strategy);
  {
    // The files are written while steps change the state from which they were copied.
    const ScopedFaults slow(
        {{.site = FaultSite::kWrite, .path = "rank-", .every = 1, .action = FaultAction::kDelay, .number = 3}});
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { train_save_train(mesh, strategy, model, beside.path(), got); });
  }
  EXPECT_TRUE(all_same_bits(got.values, wanted.values)) << what;
  EXPECT_EQ(shards_in(got.path), shards_in(wanted.path)) << what;
  EXPECT_EQ(fs::path(got.path).filename(), fs::path(wanted.path).filename());
  EXPECT_EQ(names_in(beside.path()), names_in(waiting.path())) << what;
}

TEST(AsyncCheckpoint, BytesEqualThoseOfASynchronousSave) {
  const std::pair<TinyOptions, int> kRuns[] = {{kAwkward, 1}, {kAwkward, 2}, {kWide, 3}, {kAwkward, 4}};
  for (const auto& [kept, run, placed] : pairwise_of(sampled_kept(), kRuns, kOnePerPlacement)) {
    const auto& [model, ranks] = run;
    expect_alike(ranks, strategy_of(kept, placed), model,
                 name_of(kept) + ", " + name_of(placed) + " on " + std::to_string(ranks) + " ranks");
  }
}

TEST(AsyncCheckpoint, BytesEqualASynchronousSaveWithStatesOnDisk) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const Placed& placed : kOnePerPlacement) {
      expect_alike(2, strategy_of(kept, placed, &kSomeBelow), kAwkward, name_of(kept) + ", " + name_of(placed));
    }
  }
}

TEST(AsyncCheckpoint, CopyOfTheStateIsInThePlan) {
  for (const Kept& kept : sampled_kept()) {
    for (const Placed& placed : kOnePerPlacement) {
      const TestFolder folder;
      run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
        const Strategy without = strategy_of(kept, placed);
        Strategy strategy = without;
        save_beside_training(strategy);
        Session session(mesh, strategy, kAwkward);
        save_checkpoint(session.engine, folder.path());
        const CheckpointProgress progress = *checkpoint_progress(session.engine);
        const MemoryUse use = session.engine.plan().use;
        const std::int64_t room = use[MemoryCategory::kCheckpoint];
        // A generator's state is 5 KiB. If ranks divide state that is common to them, some ranks have one more block.
        EXPECT_LE(progress.bytes, room + 8192) << name_of(kept) << ", " << name_of(placed);
        // If each rank's part has whole pages, the parts are padded, and the padding is not written.
        EXPECT_GE(progress.bytes, room / (placed.on_disk ? 4 : 2)) << name_of(kept) << ", " << name_of(placed);
        EXPECT_EQ(session.engine.allocated()[MemoryCategory::kCheckpoint], room);
        MemoryUse rest = use;
        rest[MemoryCategory::kCheckpoint] = 0;
        EXPECT_EQ(rest, Session(mesh, without, kAwkward).engine.plan().use);
      });
    }
  }
}

/// Trains until the save has ended. Returns the error of the save, or "" if there is none. `step` gets the last step.
std::string train_until_told(Session& session, std::size_t first, std::int64_t& step) {
  Deadline limit(std::chrono::seconds(30));
  for (std::size_t i = first; !limit.passed(); ++i) {
    try {
      step = session.train(i % session.batches.size()).step;
    } catch (const Error& error) {
      ++step;
      return error.message();
    }
    if (!checkpoint_progress(session.engine)) return "";
  }
  ADD_FAILURE() << "no step saw the end of the save";
  return "";
}

// Faults F22 and F23 (docs/faults.md): each file operation of a save by two ranks fails once. All ranks learn of the
// failure in the same step, nothing is left over, the previous checkpoint stays the latest, and training continues.
TEST(AsyncCheckpoint, EveryFailedOperationIsAnErrorOfOneStepOnAllRanks) {
  for (const FaultSite site :
       {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename, FaultSite::kMkdir}) {
    std::int64_t n = 1;
    for (bool hit = true; hit; ++n) {
      const TestFolder folder;
      std::string texts[2];
      std::int64_t told_at[2] = {0, 0};
      std::atomic<ScopedFaults*> faults{nullptr};
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        const auto rank = static_cast<std::size_t>(mesh.rank());
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, save_beside_training));
        session.train(0);
        save_checkpoint(session.engine, folder.path());
        finish_checkpoint(session.engine);
        session.train(1);
        if (rank == 0)
          faults = new ScopedFaults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = ENOSPC}});
        const Values meet = session.values();  // the fault plan is installed before any rank begins to save
        told_at[rank] = 2;
        try {
          save_checkpoint(session.engine, folder.path());
          texts[rank] = train_until_told(session, 2, told_at[rank]);
        } catch (const Error& error) {
          texts[rank] = error.message();
        }
        const Values meet_again = session.values();
        if (rank == 0) {
          hit = faults.load()->plan().faults() > 0;
          delete faults.exchange(nullptr);
        }
        session.train(2);
        EXPECT_FALSE(checkpoint_progress(session.engine).has_value());
        const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder.path());
        EXPECT_TRUE(loaded.step == 1 || loaded.step == 2);
        if (texts[rank].empty()) {
          EXPECT_EQ(loaded.step, 2);
        }
        save_checkpoint(session.engine, folder.path());  // the folder is free again
        finish_checkpoint(session.engine);
      });
      EXPECT_EQ(texts[0], texts[1]);
      EXPECT_EQ(told_at[0], told_at[1]);
      EXPECT_EQ(texts[0].empty(), !hit) << static_cast<int>(site) << " " << n << " " << texts[0];
      if (hit) {
        EXPECT_THAT(texts[0], AllOf(HasSubstr("rank "), HasSubstr(folder.path().string()), HasSubstr("errno 28")));
      }
      for (const std::string& name : names_in(folder.path())) EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
    }
    EXPECT_GT(n, 2) << static_cast<int>(site);
  }
}

/// Makes each file of a save take `milliseconds` longer.
ScopedFaults delayed(int milliseconds) {
  return ScopedFaults({{.site = FaultSite::kFsync,
                        .path = "rank-",
                        .every = 1,
                        .action = FaultAction::kDelay,
                        .number = milliseconds}});
}

TEST(AsyncCheckpoint, NextSaveOrLoadWaitsForTheEnd) {
  using Next = std::function<void(Session&, const fs::path&)>;
  const Next kNext[] = {
      [](Session& session, const fs::path& folder) { save_checkpoint(session.engine, folder); },
      [](Session& session, const fs::path& folder) { EXPECT_EQ(load_checkpoint(session.engine, folder).step, 1); },
      [](Session& session, const fs::path&) { session.engine.set_trainable("*", false); },
      [](Session& session, const fs::path&) { finish_checkpoint(session.engine); }};
  for (const Next& next : kNext) {
    const TestFolder folder;
    const ScopedFaults slow = delayed(50);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, save_beside_training));
      session.train(0);
      const std::string path = save_checkpoint(session.engine, folder.path());
      next(session, folder.path());
      EXPECT_TRUE(fs::exists(path + "/manifest.json"));
    });
    EXPECT_TRUE(fs::exists(folder.path() / "latest"));
  }
}

TEST(AsyncCheckpoint, DestroyedEngineWaitsForItsSave) {
  const TestFolder folder;
  const ScopedFaults slow = delayed(50);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, save_beside_training));
    save_checkpoint(session.engine, folder.path());
  });
  EXPECT_TRUE(fs::exists(folder.path() / "latest"));
}

TEST(AsyncCheckpoint, TwoEnginesSaveAtTheSameTime) {
  const TestFolder one, two;
  const ScopedFaults slow = delayed(30);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, save_beside_training);
    Session first(mesh, strategy), second(mesh, strategy);
    first.train(0);
    save_checkpoint(first.engine, one.path());
    save_checkpoint(second.engine, two.path());
    first.train(1);
    second.train(0);
    finish_checkpoint(second.engine);
    finish_checkpoint(first.engine);
    EXPECT_EQ(load_checkpoint(second.engine, one.path()).step, 1);
    EXPECT_EQ(load_checkpoint(first.engine, two.path()).step, 0);
  });
}

// The model has several MiB, so that training ends before the writer is done.
TEST(AsyncCheckpoint, ExceptionDoesNotWaitForTheDisk) {
  constexpr TinyOptions kLarge{.vocab = 100000, .width = 16, .hidden = 16, .blocks = 1};
  const TestFolder folder;
  const ScopedFaults slow(
      {{.site = FaultSite::kWrite, .path = "rank-", .every = 1, .action = FaultAction::kDelay, .number = 100}});
  Deadline soon(std::chrono::seconds(20));
  const auto body = [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, save_beside_training), kLarge);
    save_checkpoint(session.engine, folder.path());
    if (mesh.rank() == 1) throw std::runtime_error("a loss that is a pumpkin");
    for (std::size_t i = 0; i < 1000; ++i) session.train(i % session.batches.size());
  };
  EXPECT_THROW(run_ranks({.ranks = 2}, body), std::runtime_error);
  EXPECT_FALSE(soon.passed());
  EXPECT_FALSE(fs::exists(folder.path() / "latest"));
  for (const std::string& name : names_in(folder.path())) EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
}

}  // namespace async_checkpoint_test
}  // namespace tessera::testing
