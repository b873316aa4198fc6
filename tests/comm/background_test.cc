// Tests reductions that a thread makes while the caller continues.

#include "runtime/comm/compose/background.h"

#include <gmock/gmock.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/comm/collectives_properties.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

/// A group of one rank that records its calls. Its reductions end when the test allows it.
class Slow : public LocalCollectives {
 public:
  Work barrier(std::string_view label) override {
    note(label);
    return LocalCollectives::barrier(label);
  }
  void let_go(int reductions) { allowed_ += reductions, allowed_.notify_all(); }
  void fail_at(std::string label) { failing_ = std::move(label); }
  std::vector<std::string> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::thread::id thread_of_reductions() const { return thread_; }

 protected:
  Work do_reduce(const ReduceCall& call) override {
    for (int allowed = allowed_; allowed == 0; allowed = allowed_) allowed_.wait(0);
    --allowed_;
    thread_ = std::this_thread::get_id();
    note(call.label);
    if (call.label == failing_) return Work(make_error(ExitCode::kPeerLost, "rank 7 is gone"));
    return LocalCollectives::do_reduce(call);
  }

 private:
  void note(std::string_view label) {
    const std::lock_guard lock(mutex_);
    calls_.emplace_back(label);
  }

  std::atomic<int> allowed_ = 0;
  std::string failing_;
  std::thread::id thread_;
  mutable std::mutex mutex_;
  std::vector<std::string> calls_;
};

struct Background : ::testing::Test {
  Work reduce(const std::string& label, std::size_t i, SumVisitor* visitor = nullptr, Waits waits = Waits::kLater) {
    return group->reduce_scatter(label, input[i].data(), DType::kF32, output[i].data(), input[i].size(),
                                 {visitor, waits});
  }
  std::vector<std::vector<float>> input = {std::vector<float>(3000, 1), std::vector<float>(3000, 2),
                                           std::vector<float>(3000, 3)};
  std::vector<std::vector<float>> output{3, std::vector<float>(3000)};
  std::shared_ptr<Slow> slow = std::make_shared<Slow>();
  std::shared_ptr<Collectives> group = reducing_in_background(slow);
};

TEST_F(Background, ReductionsRunInOrderWhileTheCallerGoesOn) {
  Work a = reduce("a", 0), b = reduce("b", 1);  // neither call has a sum yet
  EXPECT_THAT(slow->calls(), ElementsAre());
  slow->let_go(1);
  EXPECT_TRUE(a.wait().ok());
  EXPECT_EQ(output[0], input[0]);
  Work c = reduce("c", 2);
  slow->let_go(2);
  EXPECT_TRUE(b.wait().ok());
  EXPECT_TRUE(c.wait().ok());
  EXPECT_EQ(output[2], input[2]);
  EXPECT_THAT(slow->calls(), ElementsAre("a", "b", "c"));
  EXPECT_NE(slow->thread_of_reductions(), std::this_thread::get_id());
}

TEST_F(Background, OtherCallsRunAfterReductionsUnderWay) {
  Work a = reduce("a", 0), b = reduce("b", 1);
  slow->let_go(3);
  EXPECT_TRUE(group->barrier("meet").wait().ok());
  EXPECT_TRUE(reduce("at once", 2, nullptr, Waits::kAtOnce).wait().ok());
  EXPECT_EQ(slow->thread_of_reductions(), std::this_thread::get_id());
  EXPECT_THAT(slow->calls(), ElementsAre("a", "b", "meet", "at once"));
  EXPECT_TRUE(b.wait().ok());
  EXPECT_TRUE(a.wait().ok());  // calls may be waited for in any order
}

TEST_F(Background, VisitorSeesSumsOnTheCallersThread) {
  struct Seen : SumVisitor {
    void visit(std::size_t offset, const float* sums, std::size_t numel) override {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_EQ(offset, values.size());
      values.insert(values.end(), sums, sums + numel);
    }
    std::thread::id caller = std::this_thread::get_id();
    std::vector<float> values;
  } seen;
  slow->let_go(1);
  EXPECT_TRUE(reduce("a", 1, &seen).wait().ok());
  EXPECT_EQ(seen.values, input[1]);
}

TEST_F(Background, FailedReductionFailsAllLaterOnes) {
  slow->fail_at("b");
  slow->let_go(3);
  Work a = reduce("a", 0), b = reduce("b", 1), c = reduce("c", 2);
  EXPECT_TRUE(a.wait().ok());
  EXPECT_EQ(exit_code_of(b.wait()), ExitCode::kPeerLost);
  EXPECT_EQ(c.wait(), b.wait());
}

TEST_F(Background, DroppedWorkWaitsUntilItsMemoryIsFree) {
  {
    const Work dropped = reduce("a", 0);
    slow->let_go(1);
  }
  EXPECT_THAT(slow->calls(), ElementsAre("a"));
}

// Reductions and gathers that the thread makes keep their order. Calls that the thread does not make follow after them.
TEST_F(Background, ThreadMakesGathersForTransportsWithoutTheirOwn) {
  EXPECT_FALSE(group->gathers_in_background());
  const auto both = working_in_background(slow);
  EXPECT_TRUE(both->gathers_in_background());
  Work a = both->reduce_scatter("a", input[0].data(), DType::kF32, output[0].data(), 3000, Waits::kLater);
  std::vector<float> gathered(3000);
  Work b = both->all_gather("b", input[1].data(), gathered.data(), 3000 * sizeof(float));
  EXPECT_EQ(gathered[0], 0) << "the reduction before it has not been made";
  slow->let_go(1);
  EXPECT_TRUE(b.wait().ok());
  EXPECT_EQ(gathered, input[1]);
  EXPECT_TRUE(a.wait().ok());
  slow->fail_at("c");
  slow->let_go(1);
  Work c = both->reduce_scatter("c", input[2].data(), DType::kF32, output[2].data(), 3000, Waits::kLater);
  EXPECT_EQ(exit_code_of(both->all_gather("d", input[1].data(), gathered.data(), 4).wait()), ExitCode::kPeerLost);
  EXPECT_EQ(exit_code_of(c.wait()), ExitCode::kPeerLost);
}

TEST_F(Background, GroupThatNeverReducedCanBeDestroyed) { group.reset(); }

class BackgroundRanks : public ::testing::TestWithParam<int> {};

TEST_P(BackgroundRanks, EveryOperationIsExact) {
  run_ranks({.ranks = GetParam()}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    for (const bool gathers : {false, true}) {
      const auto group = gathers ? working_in_background(axes->world) : reducing_in_background(axes->world);
      require(group->reduces_in_background() && !group->shares_memory(), "as over a network");
      require(group->gathers_in_background() == gathers, "gathers");
      check_all_operations(*group, false, 20001);
    }
  });
}

TEST_P(BackgroundRanks, ManyReductionsAreUnderWayAtATime) {
  run_ranks({.ranks = GetParam()}, [](const Mesh& mesh) {
    const auto axes = groups_of(mesh).axes(1, mesh.world_size());
    require_ok(axes.status());
    const auto group = reducing_in_background(axes->reduce);
    constexpr std::size_t kCount = 40, kNumel = 777;
    const auto ranks = static_cast<std::size_t>(group->size());
    std::vector<std::vector<float>> inputs, outputs(kCount, std::vector<float>(kNumel));
    std::vector<Work> works;
    for (std::size_t i = 0; i < kCount; ++i) {
      inputs.emplace_back(kNumel * ranks, static_cast<float>(mesh.rank() + 1) * static_cast<float>(i));
      const std::string label = "unit " + std::to_string(i);
      works.push_back(
          i % 2 == 0
              ? group->reduce_scatter(label, inputs[i].data(), DType::kF32, outputs[i].data(), kNumel, Waits::kLater)
              : group->all_reduce(label, inputs[i].data(), DType::kF32, outputs[i].data(), kNumel, Waits::kLater));
    }
    const float all = static_cast<float>(ranks * (ranks + 1) / 2);
    for (std::size_t i = 0; i < kCount; ++i) {
      require_ok(works[i].wait());
      for (const float sum : outputs[i])
        require(sum == all * static_cast<float>(i), "sum of unit " + std::to_string(i));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackgroundRanks, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera
