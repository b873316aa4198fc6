// Tests "record_hashes" and TESSERA_REPLAY. Any number of ranks writes the same lines. A step of many ranks can be
// repeated on one rank, which names what went wrong.

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine/replay/find_nonfinite.h"
#include "engine/replay/replay_request.h"
#include "engine/replay/step_records.h"
#include "engine/replay/unit_hashes.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/run.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace replay_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kSteps = 4, kAll = 8, kRows = 2, kLength = 5;

/// A fault that the test puts into a run.
struct Fault {
  std::int64_t step = -1, microbatch = -1;  ///< steps count from 0
  bool is_nan = false;                      ///< true: the loss is multiplied by the root of -1, which is NaN; false:
                                            ///< targets are changed
  bool masks = false;                       ///< all losses go through a mask of -infinity, which is no fault
  bool is_weightless = false;               ///< the microbatch has weight 0
  bool is_dropped = false;                  ///< zero_grad follows the microbatch, and the step is repeated without it
  std::int64_t count = 1;                   ///< number of microbatches with this fault; the first is `microbatch`
};

/// A part of a run of Tiny.
struct Part {
  std::int64_t begin = 0, end = kSteps;
  std::filesystem::path from = {}, to = {};  ///< checkpoint to continue from; folder for a save at the end
  TinyOptions model = {};
  std::int64_t all = kAll;  ///< microbatches of a step
};

/// Returns `loss`, computed with a mask like that of attention: softmax gives the masked element the weight 0.
at::Tensor masked(const at::Tensor& loss) {
  at::Tensor mask = at::zeros({2});
  mask[0] = -std::numeric_limits<float>::infinity();
  return ((loss * at::ones({2}) + mask).softmax(0) * loss).sum();
}

void train(const Mesh& mesh, const Strategy& strategy, const Part& part, Fault fault) {
  at::set_num_threads(1);
  Tiny model = make_tiny(part.model, /*deferred=*/true);
  Engine engine(model.ptr(), strategy, mesh);
  if (!part.from.empty()) load_checkpoint(engine, part.from);
  const std::vector<Batch> batches = make_batches(kSteps, part.all * kRows, kLength, part.model.vocab);
  for (std::int64_t step = part.begin; step < part.end; ++step) {
    const Batch& batch = batches[static_cast<std::size_t>(step)];
    while (!engine.step_is_due()) {
      const std::int64_t index = engine.microbatch();
      const bool is_faulty = step == fault.step && index >= fault.microbatch && index < fault.microbatch + fault.count;
      at::Tensor target = batch.targets.narrow(0, index * kRows, kRows);
      if (is_faulty && !fault.is_nan) target = target.flip(0);
      at::Tensor loss = model->forward(batch.tokens.narrow(0, index * kRows, kRows), target);
      if (fault.masks) loss = masked(loss);
      if (is_faulty && fault.is_nan) loss = loss * (loss.detach() * 0 - 1).sqrt();
      const double weight = is_faulty && fault.is_weightless ? 0 : 1;
      engine.backward(loss, {.tokens = kRows * kLength, .samples = kRows, .weight = weight});
      if (!is_faulty || !fault.is_dropped) continue;
      engine.zero_grad();
      fault.step = -1;
    }
    engine.step();
  }
  if (!part.to.empty()) save_checkpoint(engine, part.to);
}

/// Trains on threads, and returns the text of the exception that this run throws. The text is empty if the run ends
/// well.
std::string end_of(const ThreadRanks& ranks, Strategy strategy, const Part& part = {}, const Fault& fault = {}) {
  if (strategy.deal.microbatches == 0) strategy.gradient_accumulation = part.all / ranks.ranks;
  return error_of([&] { run_ranks(ranks, [&](const Mesh& mesh) { train(mesh, strategy, part, fault); }); });
}

class Hashes : public ::testing::Test {
 protected:
  ~Hashes() override { unsetenv("TESSERA_REPLAY"); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  Strategy recording(const Placed& placed, const std::string& file, DType dtype = DType::kF32) const {
    Strategy strategy = tiny_strategy(placed, dtype);
    strategy.reproducible = true;
    strategy.gradient_clipping = 0.5;
    strategy.record_hashes = {.every = 1, .file = path(file)};
    return strategy;
  }
  /// Returns the lines that a run writes.
  std::string lines(const ThreadRanks& ranks, const Strategy& strategy, const Part& part = {}) const {
    std::filesystem::remove(strategy.record_hashes.file);
    EXPECT_EQ(end_of(ranks, strategy, part), "");
    return TestFolder::content_of(strategy.record_hashes.file);
  }
  void ask(const std::string& request) const { setenv("TESSERA_REPLAY", request.c_str(), 1); }
  /// Returns the request to repeat `step` and compare it with the file "hashes".
  std::string request(int step, const std::string& find = "nothing") const {
    return R"({"step": )" + std::to_string(step) + R"(, "hashes": ")" + path("hashes") + R"(", "find": ")" + find +
           "\"}";
  }

  const TestFolder folder_;
};

TEST_F(Hashes, LinesAreThoseOfOneRank) {
  const Placed placed[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                           Placed(ShardingStrategy::kShardOptimizer, /*shared=*/true), ShardingStrategy::kFullShard,
                           Placed(ShardingStrategy::kFullShard, /*shared=*/true)};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string alone = lines({}, recording(ShardingStrategy::kFullShard, "alone", dtype));
    EXPECT_EQ(std::ranges::count(alone, '\n'), kSteps);
    for (const Placed& each : placed) {
      for (const int ranks : {2, 4}) {
        EXPECT_EQ(lines({.ranks = ranks}, recording(each, "many", dtype)), alone)
            << name_of(each) << " on " << ranks << " ranks";
      }
    }
  }
}

TEST_F(Hashes, LinesOfOtherRulesAndLayoutsAreThoseOfOneRank) {
  for (const int kind : {0, 1, 2, 3, 4}) {
    const auto adjusted = [&](Strategy strategy) {
      strategy.gradient_sync = GradientSync::kLastMicrobatch;
      if (kind == 1) strategy.mixed_precision.master = MasterKind::kF32;
      if (kind == 2) strategy.optimizer.type = OptimizerType::kMuon;
      if (kind == 3) {
        strategy.offload.paths = {folder_.path().string()};
        strategy.offload.masters.tier = Tier::kNvme;
      }
      return strategy;
    };
    const DType dtype = kind == 4 ? DType::kF32 : DType::kBF16;
    const Part part{.model = {.unused_block = kind == 4}};
    const std::string alone = lines({}, adjusted(recording(ShardingStrategy::kFullShard, "alone", dtype)), part);
    EXPECT_EQ(std::ranges::count(alone, '\n'), kSteps) << kind;
    EXPECT_EQ(lines({.ranks = 4}, adjusted(recording(ShardingStrategy::kFullShard, "many", dtype)), part), alone)
        << kind;
    EXPECT_EQ(lines({.ranks = 4, .hosts = 2}, adjusted(recording(ShardingStrategy::kHybridShard, "many", dtype)), part),
              alone)
        << kind;
  }
}

TEST_F(Hashes, EveryStepsAreRecordedAndARunThatGoesOnRewritesItsOwn) {
  Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  const std::string whole = lines({.ranks = 2}, strategy);
  EXPECT_TRUE(whole.starts_with(lines({.ranks = 2}, strategy, {.end = 3, .to = folder_ / "saved"})));
  folder_.write("hashes", whole + "{\"step\": 9, \"cut off");
  EXPECT_EQ(end_of({.ranks = 4}, strategy, {.begin = 3, .from = folder_ / "saved"}), "");
  EXPECT_EQ(TestFolder::content_of(path("hashes")), whole);
  strategy.record_hashes.every = 3;
  EXPECT_EQ(std::ranges::count(lines({}, strategy), '\n'), 1);
}

TEST_F(Hashes, FileThatIsSomethingElseIsKeptAndNamed) {
  folder_.write("hashes", "a diary\n");
  const std::string told = end_of({.ranks = 2}, recording(ShardingStrategy::kFullShard, "hashes"));
  EXPECT_THAT(told, HasSubstr(path("hashes") + ":1"));
  EXPECT_EQ(TestFolder::content_of(path("hashes")), "a diary\n");
}

TEST_F(Hashes, StepOfEightRanksIsMadeAgainOnOne) {
  const std::string recorded =
      lines({.ranks = 8}, recording(ShardingStrategy::kFullShard, "hashes"), {.end = 2, .to = folder_ / "saved"});
  end_of({.ranks = 8}, recording(ShardingStrategy::kFullShard, "hashes"), {.begin = 2, .from = folder_ / "saved"});
  const std::string all = TestFolder::content_of(path("hashes"));
  ASSERT_EQ(all.substr(0, recorded.size()), recorded);
  ask(request(4));
  Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  strategy.mesh.shard = 8;
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  // The strategy says that a step has one microbatch, and the Engine makes eight.
  EXPECT_EQ(end_of({}, strategy, {.begin = 2, .from = folder_ / "saved", .to = folder_ / "again"}), "");
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), all.substr(recorded.size()));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("step 4 has the recorded loss, norm and hashes of all 4 units"),
                    HasSubstr("no checkpoint is saved")));
  EXPECT_EQ(TestFolder::content_of(path("hashes")), all) << "a replay writes no file";
  EXPECT_FALSE(std::filesystem::exists(folder_ / "again"));
}

TEST_F(Hashes, FirstStepAndUnitThatDiffersIsNamed) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  lines({.ranks = 8}, strategy);
  const Fault fault{.step = 1, .microbatch = 5};
  ask(request(4, "divergence"));
  EXPECT_THAT(end_of({}, strategy, {}, fault), AllOf(HasSubstr("step 2 differs from " + path("hashes")),
                                                     HasSubstr("units, of which "), Not(HasSubstr("threads a rank"))));
  ask(request(4));
  EXPECT_THAT(end_of({}, strategy, {}, fault), HasSubstr("step 4 differs"));
  ask(request(1, "divergence"));
  EXPECT_EQ(end_of({}, strategy, {}, fault), "") << "later steps are not looked at";
}

TEST_F(Hashes, DivergenceOfStepsOfWhichNoneWasRecordedIsAnError) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  const std::string whole = lines({.ranks = 8}, strategy);
  const std::size_t second = whole.find('\n') + 1;
  folder_.write("hashes", whole.substr(second));
  ask(R"({"step": 1, "find": "divergence", "microbatches": 8, "hashes": ")" + path("hashes") + R"("})");
  EXPECT_THAT(end_of({}, strategy), HasSubstr("so nothing was compared"));
  folder_.write("hashes", whole.substr(0, second));
  ask(R"({"step": 2, "find": "divergence", "microbatches": 8, "hashes": ")" + path("hashes") + R"("})");
  EXPECT_EQ(end_of({}, strategy), "") << "step 1 was compared";
}

// The runs of two ranks have 12 and 13 microbatches, and are dealt again after each step.
TEST_F(Hashes, StepOfRunsThatRanksDoNotDivideIsMadeAgainOnOneAndOnFive) {
  Strategy strategy = recording(ShardingStrategy::kShardGradients, "hashes");
  strategy.gradient_sync = GradientSync::kLastMicrobatch;
  strategy.deal = {.by = DealBy::kSpeed, .window = 1, .microbatches = 25};
  const Part part{.all = 25};
  const std::string recorded = lines({.ranks = 2}, strategy, part);
  ASSERT_EQ(std::ranges::count(recorded, '\n'), kSteps);
  EXPECT_THAT(recorded, HasSubstr(R"("microbatches":25)"));
  ask(request(kSteps, "divergence"));
  for (const int ranks : {1, 5}) EXPECT_EQ(end_of({.ranks = ranks}, strategy, part), "") << ranks << " ranks";
  EXPECT_THAT(end_of({}, strategy, part, {.step = 2, .microbatch = 24}), HasSubstr("step 3 differs from "));
  EXPECT_THAT(end_of({.ranks = 2}, strategy, part),
              HasSubstr("25 microbatches, which 2 ranks cannot share out evenly"));
}

// Ranks are processes, and each of them trains inside of tessera::run, as a user's program does.
TEST_F(Hashes, ProgramUnderRunMakesAStepOfFourRanksAgainOnOne) {
  at::set_num_threads(1);
  const auto codes_of = [&](int ranks, const Fault& fault) {
    Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
    strategy.gradient_accumulation = kAll / ranks;
    const int port = free_port();
    const std::vector<RankEnd> ends = fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
      join_as(rank, ranks, port);
      const int code = run([&] { train(init(), strategy, {}, fault); });
      return code == 0 ? absl::OkStatus() : make_error(static_cast<ExitCode>(code), "run returned an error");
    });
    std::vector<ExitCode> codes;
    for (const RankEnd& end : ends) codes.push_back(end.signal == 0 ? end.exit_code : ExitCode::kInternal);
    return codes;
  };
  EXPECT_EQ(codes_of(4, {}), std::vector<ExitCode>(4, ExitCode::kOk));
  const std::string recorded = TestFolder::content_of(path("hashes"));
  EXPECT_EQ(std::ranges::count(recorded, '\n'), kSteps);
  ask(request(kSteps, "divergence"));
  EXPECT_EQ(codes_of(1, {}), std::vector<ExitCode>(1, ExitCode::kOk));
  EXPECT_EQ(codes_of(1, {.step = 1, .microbatch = 5}), std::vector<ExitCode>(1, ExitCode::kCorruptData));
  ask(request(kSteps, "nonfinite"));
  const std::string said = stderr_of([&] {
    const Fault fault{.step = 1, .microbatch = 5, .is_nan = true};
    EXPECT_EQ(codes_of(1, fault), std::vector<ExitCode>(1, ExitCode::kCorruptData));
  });
  EXPECT_THAT(said, HasSubstr("in step 2, microbatch 5 (of 0 to 7)"));
  EXPECT_EQ(TestFolder::content_of(path("hashes")), recorded) << "a replay writes no file";
}

TEST_F(Hashes, PlantedNaNIsNamedWithItsMicrobatchAndOperator) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  const Fault fault{.step = 2, .microbatch = 5, .is_nan = true, .masks = true};
  EXPECT_EQ(end_of({.ranks = 8}, strategy, {}, fault), "") << "the step is skipped";
  EXPECT_THAT(TestFolder::content_of(path("hashes")),
              HasSubstr(R"("step":3,"microbatches":8,"threads":1,"loss":null)"));
  ask(request(4, "nonfinite"));
  EXPECT_THAT(end_of({}, strategy, {}, fault),
              AllOf(HasSubstr("in step 3, microbatch 5 (of 0 to 7)"),
                    HasSubstr("that of aten::sqrt (forward), after unit "), HasSubstr("its inputs are finite")));
  EXPECT_EQ(end_of({}, strategy, {}, {.masks = true}).find("goes wrong"), std::string::npos)
      << "a mask of -infinity is no fault";
}

TEST_F(Hashes, DroppedMicrobatchIsNotBlamed) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  lines({.ranks = 8}, strategy);
  ask(request(4, "nonfinite"));
  EXPECT_EQ(end_of({}, strategy, {}, {.step = 2, .microbatch = 5, .is_nan = true, .is_dropped = true}), "");
}

TEST_F(Hashes, MicrobatchThatCountsForNothingIsNotBlamed) {
  ask(R"({"step": 1, "microbatches": 8, "find": "nonfinite"})");
  const Fault fault{.step = 0, .microbatch = 5, .is_nan = true, .is_weightless = true};
  EXPECT_EQ(end_of({}, recording(ShardingStrategy::kFullShard, "hashes"), {}, fault), "");
}

// Ranks are processes, since operators of several threads could not be distinguished.
TEST_F(Hashes, FirstOfSeveralRanksMicrobatchesIsTheOneNamed) {
  constexpr int kRanks = 4;
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  ask(R"({"step": 1, "microbatches": 8, "find": "nonfinite"})");
  const int port = free_port();
  const std::vector<RankEnd> ends = fork_ranks(kRanks, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, kRanks, port, /*hosts=*/1);
    train(init(), strategy, {}, {.step = 0, .microbatch = 4, .is_nan = true, .count = kRanks});
    return absl::OkStatus();
  });
  EXPECT_THAT(ends[0].message, HasSubstr("in step 1, microbatch 4 (of 0 to 7) is the first"));
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_NE(ends[rank].exit_code, ExitCode::kOk) << rank;
    EXPECT_THAT(ends[rank].message, Not(HasSubstr("microbatch " + std::to_string(4 + rank)))) << rank;
  }
}

TEST_F(Hashes, MicrobatchesAreThoseOfTheStepAskedFor) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  const std::string whole = lines({.ranks = 8}, strategy);
  const StepRecord later{.step = 9, .microbatches = 16, .threads = 1, .loss = 1, .grad_norm = 1, .units = {}};
  folder_.write("hashes", whole + to_line(later));
  ask(request(4, "divergence"));
  EXPECT_EQ(end_of({}, strategy), "");
  const StepRecord other{.step = 1, .microbatches = 16, .threads = 1, .loss = 1, .grad_norm = 1, .units = {}};
  folder_.write("hashes", to_line(other));
  ask(R"({"step": 1, "hashes": ")" + path("hashes") + R"(", "microbatches": 8})");
  EXPECT_THAT(end_of({}, strategy), HasSubstr("it was recorded with 16 microbatches, and this run makes 8"));
}

TEST_F(Hashes, RequestsThatCannotBeMetAreRefusedWithWhatToDo) {
  const Strategy strategy = recording(ShardingStrategy::kFullShard, "hashes");
  const std::pair<const char*, const char*> requests[] = {
      {"12", "wanted a JSON object"},
      {R"({"stepp": 2})", "unknown key \"stepp\". [T0880] hint: known are step, hashes"},
      {R"({"find": "nonfinite", "microbatches": 8})", "\"step\" is missing"},
      {R"({"step": "2"})", "wanted is an integer"},
      {R"({"step": 0})", "hint: write a whole number above 0"},
      {R"({"step": 2, "find": "nonfinit", "microbatches": 8})",
       "\"find\" is \"nonfinit\". [T0882] hint: it is \"nonfinite\""},
      {R"({"step": 2, "find": "divergence", "microbatches": 8})", "nothing to compare with"},
      {R"({"step": 2})", "how many microbatches"},
      {R"({"step": 2, "microbatches": 7})", "7 microbatches, which 2 ranks cannot share out evenly"},
      {R"({"step": 2, "hashes": "/missing"})", "/missing"}};
  for (const auto& [request, wanted] : requests) {
    ask(request);
    EXPECT_THAT(end_of({.ranks = 2}, strategy), AllOf(HasSubstr(wanted), HasSubstr("hint: "))) << request;
  }
  ask(R"({"step": 2, "microbatches": 8})");
  EXPECT_THAT(end_of({}, tiny_strategy(ShardingStrategy::kFullShard)), HasSubstr("\"reproducible\": true"));
  Strategy durable = strategy;
  durable.durable = {.every = 1, .dir = path("durable")};
  EXPECT_THAT(end_of({}, durable), HasSubstr("\"durable\""));
}

TEST_F(Hashes, ReplayIsRefusedWhereAGpuTrains) {
  EXPECT_EQ(error_of([] { expect_no_replay(); }), "");
  ask(R"({"step": 1, "microbatches": 8})");
  EXPECT_THAT(error_of([] { expect_no_replay(); }), AllOf(HasSubstr("a GPU trains"), HasSubstr("comm.transport")));
}

TEST(FindNonfinite, InputsAreThoseBeforeTheOperator) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor loss = at::full({}, kNaN), bad = at::full({2}, kNaN), rest = at::full({2}, kNaN);
  FindNonfinite watch;
  const auto result_of = [&](const auto& run) {
    run();
    const std::optional<NonfiniteResult> result = watch.end_backward(loss);
    return result ? (result->had_bad_input ? "bad input of " : "finite inputs of ") + result->op : "nothing";
  };
  // These operators overwrite their own input. LibTorch runs some of them, such as mul_, as mul.out, and passes the
  // input a second time, as `out`.
  EXPECT_THAT(result_of([] { at::ones({2}).div_(at::zeros({2})); }), HasSubstr("finite inputs of aten::div"));
  EXPECT_THAT(result_of([] { at::full({2}, 1e38).mul_(1e38); }), HasSubstr("finite inputs of aten::mul"));
  EXPECT_THAT(result_of([&] { bad.mul_(2); }), HasSubstr("bad input of aten::mul"));
  EXPECT_THAT(result_of([&] { at::ones({2}).mul_(bad); }), HasSubstr("bad input of aten::mul"));
  EXPECT_THAT(result_of([&] { rest.fill_(kInfinity); }), HasSubstr("finite inputs of aten::fill_"));
  EXPECT_THAT(result_of([&] { rest.copy_(bad); }), HasSubstr("bad input of aten::copy_"));
  EXPECT_THAT(result_of([&] { at::cat({at::ones({2}), bad}); }), HasSubstr("bad input of aten::cat"));
  // Only the operator has a reference to the input.
  EXPECT_THAT(result_of([] { at::ones({2}).neg().sqrt(); }), HasSubstr("finite inputs of aten::sqrt"));
}

TEST(UnitHash, RunsAddUpAndEachBitCounts) {
  std::vector<float> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  const auto hash = [&](std::size_t begin, std::size_t end, std::int64_t number = 3,
                        HashedKind kind = HashedKind::kMasters) {
    return hash_of_run(kind, number, static_cast<std::int64_t>(begin),
                       std::span<const float>(values).subspan(begin, end - begin));
  };
  const std::uint64_t whole = hash(0, 1000);
  EXPECT_EQ(hash(0, 137) + hash(137, 640) + hash(640, 1000), whole);
  EXPECT_NE(hash(0, 1000, 4), whole);
  EXPECT_NE(hash(0, 1000, 3, HashedKind::kGradients), whole);
  std::swap(values[10], values[11]);
  EXPECT_NE(hash(0, 1000), whole);
  std::swap(values[10], values[11]);
  values[999] = std::nextafter(values[999], 2.0f);
  EXPECT_NE(hash(0, 1000), whole);
  values[999] = std::nan("");
  const std::uint64_t not_a_number = hash(0, 1000);
  values[999] = -std::nan("7");
  EXPECT_EQ(hash(0, 1000), not_a_number) << "all NaN count as one";
  values[999] = std::numeric_limits<float>::infinity();
  EXPECT_NE(hash(0, 1000), not_a_number);
}

}  // namespace replay_test
}  // namespace tessera::testing
