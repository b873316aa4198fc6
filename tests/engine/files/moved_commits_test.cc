// Tests that an Engine with "reproducible" goes on from commits of another number of ranks ("durable"). It ends with
// the bits of a run on one rank that was not disturbed, also if it dies while it makes a checkpoint of the commits.
// reproducible_test.cc does the same with dropout, on ranks that are processes; tests/app/durable_test.cc with the
// command.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "offload/files/fault_plan.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tests/engine/files/reproducible_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace moved_commits_test {

using reproducible_test::kRules;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

using States = std::map<std::string, std::string>;

constexpr std::int64_t kMicrobatches = 12, kRowsOfEach = 2, kLengthOfRow = 5;
constexpr std::size_t kAllSteps = 4;

/// The steps [begin, end) of a run. The run commits each of them if the strategy has "durable".
struct Steps {
  std::size_t begin = 0, end = kAllSteps;
  fs::path saves = {};  ///< folder for a checkpoint at the end; empty: none is saved
};

/// Makes the steps on this rank. Returns the bytes of the checkpoint, if one is saved.
States make_steps(const Mesh& mesh, Strategy strategy, const Steps& steps) {
  at::set_num_threads(1);
  const bool commits = strategy.durable.every > 0;
  const TinyOptions options;
  strategy.gradient_accumulation = kMicrobatches / mesh.world_size();
  Tiny model = make_tiny(options, /*deferred=*/true);
  Engine engine(model.ptr(), strategy, mesh);
  if (commits) {
    const std::optional<LoadedCheckpoint> resumed = resume_durable(engine);
    EXPECT_EQ(resumed ? resumed->step : 0, static_cast<std::int64_t>(steps.begin));
    if (resumed) {
      EXPECT_EQ(resumed->items.json.at("steps"), std::to_string(steps.begin));
      EXPECT_TRUE(resumed->inexact.empty());
    }
  }
  const std::vector<Batch> batches = make_batches(kAllSteps, kMicrobatches * kRowsOfEach, kLengthOfRow, options.vocab);
  for (std::size_t step = steps.begin; step < steps.end; ++step) {
    while (!engine.step_is_due()) {
      const std::int64_t begin = engine.microbatch() * kRowsOfEach;
      engine.backward(model->forward(batches[step].tokens.narrow(0, begin, kRowsOfEach),
                                     batches[step].targets.narrow(0, begin, kRowsOfEach)));
    }
    engine.step();
    if (!commits) continue;
    CheckpointItems items;
    items.json["steps"] = std::to_string(step + 1);
    EXPECT_TRUE(commit_durable(engine, items));
  }
  if (commits) finish_commit(engine);
  return steps.saves.empty() ? States() : tensors_of(save_checkpoint(engine, steps.saves));
}

/// Makes the steps on ranks that are threads. Returns what rank 0 returns.
States make_steps_on(const ThreadRanks& ranks, const Strategy& strategy, const Steps& steps) {
  States states;
  run_ranks(ranks, [&](const Mesh& mesh) {
    States own = make_steps(mesh, strategy, steps);
    if (mesh.rank() == 0) states = std::move(own);
  });
  return states;
}

Strategy in_a_tree(const Placed& placed, DType dtype = DType::kF32, std::size_t rule = 0) {
  return reproducible_test::reproducible(placed, dtype, kRules[rule], GradientSync::kLastMicrobatch);
}

Strategy committing(Strategy strategy, const TestFolder& folder) {
  strategy.durable = {.every = 1, .dir = (folder / "durable").string()};
  return strategy;
}

States of_one_rank(const Strategy& strategy) {
  const TestFolder folder;
  return make_steps_on({}, strategy, {.saves = folder / "saved"});
}

void expect_same_states(const States& got, const States& wanted, const std::string& what) {
  ASSERT_FALSE(wanted.empty());
  EXPECT_EQ(got.size(), wanted.size()) << what;
  for (const auto& [name, bytes] : wanted) {
    const auto found = got.find(name);
    EXPECT_TRUE(found != got.end() && found->second == bytes) << what << ", " << name;
  }
}

/// Ranks that commit two steps, and the form in which they keep memory.
struct Committed {
  const char* what;
  std::vector<int> hosts;  ///< number of ranks on each host
  Strategy strategy;
};

/// The ranks of `committed` make two steps, one rank makes the third, and four ranks make the last.
void expect_goes_on_with_other_ranks(Committed committed) {
  const TestFolder folder;
  const OffloadConfig offload = std::exchange(committed.strategy.offload, {});
  const States wanted = of_one_rank(committed.strategy);
  committed.strategy.offload = offload;
  fs::create_directory(folder / "disk");
  if (offload.is_used()) committed.strategy.offload.paths = {(folder / "disk").string()};
  const Strategy strategy = committing(committed.strategy, folder);
  const int ranks = std::accumulate(committed.hosts.begin(), committed.hosts.end(), 0);
  make_steps_on({.ranks = ranks, .ranks_of_hosts = committed.hosts}, strategy, {.end = 2});
  make_steps_on({}, strategy, {.begin = 2, .end = 3});
  EXPECT_FALSE(fs::exists(folder / "durable/moved-commits")) << "the new rank has committed";
  EXPECT_FALSE(fs::exists(folder / "durable/rank-00001.begun")) << committed.what;
  for (const auto& entry : fs::directory_iterator(folder / "disk"))
    EXPECT_EQ(entry.path().filename().string().find("-rank-1."), std::string::npos) << entry.path();
  const States got = make_steps_on({.ranks = 4}, strategy, {.begin = 3, .saves = folder / "saved"});
  expect_same_states(got, wanted, committed.what);
}

TEST(MovedCommits, AnEngineGoesOnWithOtherRanksToTheSameBits) {
  Strategy below = in_a_tree(ShardingStrategy::kFullShard, DType::kBF16, 3);
  below.offload.moments = {Tier::kNvme, 0.5};
  below.offload.record_bytes = 4096;
  const Committed all[] = {
      {"shared parameters", {2}, in_a_tree(Placed(ShardingStrategy::kFullShard, /*shared=*/true))},
      {"states in files", {2}, below},
      {"a replica on each host", {2, 2}, in_a_tree(ShardingStrategy::kHybridShard, DType::kF32, 1)},
      {"unequal hosts", {1, 2}, in_a_tree(ShardingStrategy::kShardGradients, DType::kBF16, 2)},
      {"whole parameters", {3}, in_a_tree(ShardingStrategy::kNoShard)}};
  for (const Committed& committed : all) {
    SCOPED_TRACE(committed.what);
    expect_goes_on_with_other_ranks(committed);
  }
}

// The process dies while the checkpoint of the commits is made, or between two removals of old commits.
TEST(MovedCommits, DeathWhileCommitsAreMovedLosesNoStep) {
  at::set_num_threads(1);
  const Strategy plain = in_a_tree(ShardingStrategy::kFullShard);
  const States wanted = of_one_rank(plain);
  for (const auto& [site, path, nth] : {std::tuple(FaultSite::kRename, "durable/moved-commits/step-", 1),
                                        std::tuple(FaultSite::kUnlink, "durable/rank-0000", 2)}) {
    const TestFolder folder;
    const Strategy strategy = committing(plain, folder);
    make_steps_on({.ranks = 2}, strategy, {.end = 2});
    const std::vector<RankEnd> ends = fork_ranks(1, [&, &site = site, &path = path, &nth = nth](int, KeyValueStore&) {
      const ScopedFaults dies({{.site = site, .path = path, .nth = nth, .action = FaultAction::kCrash, .number = 137}});
      make_steps_on({}, strategy, {.begin = 2, .end = 3});
      return absl::OkStatus();
    });
    EXPECT_EQ(static_cast<int>(ends[0].exit_code), 137) << path;
    const States got = make_steps_on({.ranks = 4}, strategy, {.begin = 2, .saves = folder / "saved"});
    expect_same_states(got, wanted, path);
  }
}

/// Returns the error of Engines on `ranks` ranks with `threads` threads each, which is the same on all of them.
std::string refusal_on(int ranks, int threads, const Strategy& strategy, const TinyOptions& options = {}) {
  std::vector<std::string> each(static_cast<std::size_t>(ranks));
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    at::set_num_threads(threads);
    Tiny model = make_tiny(options, /*deferred=*/true);
    each[static_cast<std::size_t>(mesh.rank())] = error_of([&] { const Engine engine(model.ptr(), strategy, mesh); });
  });
  for (const std::string& text : each) EXPECT_EQ(text, each[0]);
  return each[0];
}

/// Returns the names and bytes of the files in a folder, without files of locks.
std::map<std::string, std::string> files_in(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().extension() != ".lock")
      files[entry.path().filename().string()] = TestFolder::content_of(entry.path());
  }
  return files;
}

TEST(MovedCommits, CommitsThatCannotGoOnAreNamedAndStay) {
  const TestFolder folder;
  const Strategy strategy = committing(in_a_tree(ShardingStrategy::kFullShard), folder);
  make_steps_on({.ranks = 2}, strategy, {.end = 2});
  const fs::path durable = folder / "durable", elsewhere = folder / "elsewhere";
  const auto before = files_in(durable);
  ASSERT_GE(before.size(), 6u);
  EXPECT_THAT(refusal_on(4, 2, strategy),
              AllOf(HasSubstr("the commits of 2 ranks stay as they are, and do not become a checkpoint for 4"),
                    HasSubstr("this run computes with another processor: threads 2, the run before has 1"),
                    HasSubstr("hint:")));
  EXPECT_THAT(refusal_on(1, 1, strategy, {.width = 16}), AllOf(HasSubstr("stay as they are"), HasSubstr("its model")));
  Strategy off = strategy;
  off.reproducible = false;
  EXPECT_THAT(refusal_on(1, 1, off), AllOf(HasSubstr("holds step 2 of a run of 2 ranks"), HasSubstr("from-commits")));
  EXPECT_TRUE(files_in(durable) == before);
  fs::create_directory(elsewhere);
  for (const char* name : {"rank-00001.commit-0", "rank-00001.commit-1"}) fs::rename(durable / name, elsewhere / name);
  EXPECT_THAT(refusal_on(4, 1, strategy),
              AllOf(HasSubstr("holds commits of 2 ranks, and rank 0's host has those of 1"), HasSubstr("rank-*")));
  for (const char* name : {"rank-00001.commit-0", "rank-00001.commit-1"}) fs::rename(elsewhere / name, durable / name);
  EXPECT_TRUE(files_in(durable) == before);
  make_steps_on({.ranks = 4}, strategy, {.begin = 2, .end = 3});
}

// A commit in place of the moved ones would lose their steps.
TEST(MovedCommits, ARunThatDoesNotResumeCannotCommit) {
  const TestFolder folder;
  const Strategy strategy = committing(in_a_tree(ShardingStrategy::kFullShard), folder);
  make_steps_on({.ranks = 2}, strategy, {.end = 2});
  run_ranks({}, [&](const Mesh& mesh) {
    at::set_num_threads(1);
    Strategy alone = strategy;
    alone.gradient_accumulation = 1;
    Tiny model = make_tiny({}, /*deferred=*/true);
    Engine engine(model.ptr(), alone, mesh);
    EXPECT_THAT(error_of(ExitCode::kUsage, [&] { commit_durable(engine); }),
                AllOf(HasSubstr("holds step 2"), HasSubstr("resume_durable")));
  });
  make_steps_on({.ranks = 4}, strategy, {.begin = 2, .end = 3});
}

}  // namespace moved_commits_test
}  // namespace tessera::testing
