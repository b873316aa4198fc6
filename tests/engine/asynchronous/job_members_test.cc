// Tests how a parameter server manages its workers: which worker gives the first values, which worker gets which steps,
// and for which workers no other worker waits.

#include "engine/asynchronous/servers/job_members.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "runtime/base/status.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using Deal = JobMembers::Deal;
using Kind = JobMembers::Deal::Kind;
using namespace std::chrono_literals;

bool stays() { return false; }

/// Joins an elastic run. The first worker that joins also gives the first values.
int joined(JobMembers& members) {
  const auto place = members.join(JobMembers::kAnyNumber);
  EXPECT_TRUE(place.ok() && place->has_value());
  if ((*place)->gives_values) {
    EXPECT_TRUE(members.begin((*place)->number).ok());
  }
  return (*place)->number;
}

constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

Deal dealt(JobMembers& members, int number, std::int64_t steps, std::int64_t taken = kAll) {
  const auto deal = members.deal(number, steps, taken);
  EXPECT_TRUE(deal.ok()) << deal.status();
  return deal.value_or(Deal{Kind::kOver});
}

TEST(JobMembers, NextWorkerGivesTheFirstValuesWhereTheFirstOneLeavesBefore) {
  JobMembers members(0, 1s);
  const auto first = members.join(JobMembers::kAnyNumber);
  ASSERT_TRUE(first.ok() && first->has_value());
  EXPECT_TRUE((*first)->gives_values);
  const auto waits = members.join(JobMembers::kAnyNumber);
  ASSERT_TRUE(waits.ok());
  EXPECT_FALSE(waits->has_value()) << "the first one has not begun";
  EXPECT_FALSE(members.lasts());
  members.leave((*first)->number);
  const auto second = members.join(JobMembers::kAnyNumber);
  ASSERT_TRUE(second.ok() && second->has_value());
  EXPECT_TRUE((*second)->gives_values);
  EXPECT_NE((*second)->number, (*first)->number);
  EXPECT_FALSE(members.begin((*first)->number).ok());
  EXPECT_TRUE(members.begin((*second)->number).ok());
  const auto third = members.join(JobMembers::kAnyNumber);
  ASSERT_TRUE(third.ok() && third->has_value());
  EXPECT_FALSE((*third)->gives_values);
  members.leave((*second)->number);
  members.leave((*third)->number);
  EXPECT_TRUE(members.is_empty());
  EXPECT_TRUE(members.lasts());
}

// Server 0 numbers workers from 0 again if its only worker has left before that worker began. Another server may notice
// later that the worker has left.
TEST(JobMembers, WorkerWaitsForTheEndOfAnotherConnectionWithItsNumber) {
  JobMembers members(0, 1s);
  const auto first = members.join(0);
  ASSERT_TRUE(first.ok() && first->has_value());
  const auto waits = members.join(0);
  ASSERT_TRUE(waits.ok());
  EXPECT_FALSE(waits->has_value());
  members.leave(0);
  const auto second = members.join(0);
  EXPECT_TRUE(second.ok() && second->has_value());
}

TEST(JobMembers, StepsOfAWorkerThatLeavesAreDealtAgainAndEachIsMadeOnce) {
  JobMembers members(0, 1s);
  const int a = joined(members), b = joined(members);
  std::set<std::int64_t> made;
  EXPECT_EQ(dealt(members, a, 5).step, 0);
  EXPECT_EQ(dealt(members, b, 5).step, 1);
  EXPECT_EQ(dealt(members, b, 5).step, 2) << "steps may be taken ahead";
  members.note(a, 1, 1);
  made.insert(0);
  members.note(b, 1, 0);
  members.leave(b);
  for (std::int64_t pushed = 2;; ++pushed) {
    const Deal deal = dealt(members, a, 5);
    if (deal.kind != Kind::kStep) {
      EXPECT_EQ(deal.kind, Kind::kOver);
      EXPECT_TRUE(deal.finishes);
      break;
    }
    EXPECT_TRUE(made.insert(deal.step).second) << deal.step;
    members.note(a, pushed, pushed);
  }
  EXPECT_EQ(made, (std::set<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(JobMembers, EachStepIsMadeOnceWhoeverComesAndGoes) {
  constexpr std::int64_t kSteps = 40;
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    JobMembers members(0, 1s);
    struct Worker {
      std::int64_t pushed = 0;
      std::deque<std::int64_t> steps;
    };
    std::map<int, Worker> workers;
    std::multiset<std::int64_t> made;
    bool is_over = false;
    for (int i = 0; !is_over; ++i) {
      ASSERT_LT(i, 100'000);
      const auto place_of_one = workers.empty() ? 0 : static_cast<std::ptrdiff_t>(random() % workers.size());
      const auto one = std::next(workers.begin(), place_of_one);
      const auto action = random() % 16;
      if (one == workers.end() || (action == 0 && workers.size() < 6)) {
        const auto place = members.join(JobMembers::kAnyNumber);
        ASSERT_TRUE(place.ok());
        if (!place->has_value()) continue;  // the first worker has not begun
        workers[(*place)->number].pushed = 0;
      } else if (action == 1) {
        members.leave(one->first);
        workers.erase(one);
      } else if (action < 6 && !one->second.steps.empty()) {
        made.insert(one->second.steps.front());
        one->second.steps.pop_front();
        ++one->second.pushed;
        members.note(one->first, one->second.pushed, one->second.pushed);
      } else {
        if (!members.lasts()) {
          ASSERT_TRUE(members.begin(one->first).ok());
        }
        const Deal deal = dealt(members, one->first, kSteps);
        if (deal.kind == Kind::kStep) {
          one->second.steps.push_back(deal.step);
        }
        is_over = deal.kind == Kind::kOver;
      }
    }
    EXPECT_EQ(made.size(), static_cast<std::size_t>(kSteps));
    EXPECT_EQ(std::set<std::int64_t>(made.begin(), made.end()).size(), static_cast<std::size_t>(kSteps));
  }
}

TEST(JobMembers, OneOfThoseThatAreThereFinishes) {
  JobMembers members(0, 1s);
  const int a = joined(members), b = joined(members);
  dealt(members, a, 1);
  EXPECT_EQ(dealt(members, a, 1).kind, Kind::kOwnFirst);
  EXPECT_EQ(dealt(members, b, 1).kind, Kind::kAskAgain) << "the other one may leave";
  members.note(a, 1, 1);
  EXPECT_TRUE(dealt(members, a, 1).finishes);
  EXPECT_FALSE(dealt(members, b, 1).finishes);
  members.leave(a);
  EXPECT_TRUE(dealt(members, b, 1).finishes);
}

TEST(JobMembers, NobodyWritesTheResultsAgainOnceTheyAreWritten) {
  JobMembers members(0, 1s);
  const int a = joined(members), b = joined(members);
  dealt(members, a, 1);
  members.note(a, 1, 1);
  EXPECT_TRUE(dealt(members, a, 1).finishes);
  EXPECT_THAT(message_of(members.end_results(b)), HasSubstr("was not to write the results"));
  EXPECT_TRUE(members.end_results(a).ok());
  members.leave(a);
  const Deal late = dealt(members, b, 1);
  EXPECT_EQ(late.kind, Kind::kOver);
  EXPECT_FALSE(late.finishes);
}

TEST(JobMembers, NumbersOfStepsThatDifferAreRefused) {
  JobMembers members(0, 1s);
  const int a = joined(members), b = joined(members);
  EXPECT_THAT(message_of(members.deal(a, 0, kAll).status()), HasSubstr("has none to deal"));
  dealt(members, a, 3);
  EXPECT_THAT(message_of(members.deal(b, 4, kAll).status()), HasSubstr("with the same number of steps"));
}

TEST(JobMembers, DataInAnotherOrderAreRefusedAlsoByAServerThatHasComeBack) {
  JobMembers members(0, 1s);
  const int a = joined(members), b = joined(members);
  EXPECT_TRUE(members.deal(a, 3, kAll, 17).ok());
  EXPECT_THAT(message_of(members.deal(b, 3, kAll, 18).status()), HasSubstr("other data than the others"));
  EXPECT_TRUE(members.deal(b, 3, kAll, 17).ok());
  JobMembers back(0, 1s);
  ASSERT_TRUE(back.restore(members.image().first));
  const int late = joined(back);
  EXPECT_THAT(message_of(back.deal(late, 3, kAll, 18).status()), HasSubstr("other data than the others"));
  EXPECT_TRUE(back.deal(late, 3, kAll, 17).ok());
}

/// Returns the condition that a worker has pushed at least `steps` steps.
auto all_at(std::int64_t steps) {
  return [steps](int, const JobMembers::Member& member) { return member.pushed >= steps; };
}

// A worker that has joined may take long to load its model and its data.
TEST(JobMembers, NewWorkerCountsFromTheSlowestAtItsFirstPullAndHoldsNobodyUpBefore) {
  JobMembers members(0, 100ms);
  const int a = joined(members), b = joined(members);
  EXPECT_EQ(members.begin_step(a).counted, 0);
  EXPECT_EQ(members.begin_step(b).counted, 0);
  const int late = joined(members);
  members.note(a, 7, 7);
  members.note(b, 5, 5);
  EXPECT_TRUE(members.await(all_at(5), a, stays).ok());
  EXPECT_EQ(members.begin_step(late).counted, 5);
  EXPECT_THAT(message_of(members.await(all_at(6), b, stays)), HasSubstr("timed out waiting for rank 2"));
  members.note(late, 6, 6);
  EXPECT_EQ(members.begin_step(late).counted, 6) << "it goes on by its own count";
  EXPECT_TRUE(members.await(all_at(6), b, stays).ok());
}

TEST(JobMembers, WorkerWithoutStepsHoldsNobodyUp) {
  JobMembers members(0, 100ms);
  const int a = joined(members), b = joined(members);
  members.begin_step(a);
  members.begin_step(b);
  members.note(a, 7, 7);
  members.note(b, 5, 5);
  EXPECT_THAT(message_of(members.await(all_at(6), a, stays)), HasSubstr("timed out waiting for rank"));
  dealt(members, a, 1);
  dealt(members, b, 1);  // no step is left, so the worker rests
  EXPECT_TRUE(members.await(all_at(6), a, stays).ok());
}

TEST(JobMembers, PushesWaitForAWorkerThatHoldsAndGoOnWhenItLeaves) {
  JobMembers members(0, 60s);
  const int a = joined(members), b = joined(members);
  ASSERT_TRUE(members.hold(a, stays).ok());
  EXPECT_THAT(message_of(members.begin_push(b, [] { return true; })), HasSubstr("has gone"));
  ASSERT_TRUE(members.begin_push(a, stays).ok()) << "its own pushes do not wait";
  members.end_push();
  std::thread leaving([&] { members.leave(a); });
  EXPECT_TRUE(members.begin_push(b, stays).ok());
  leaving.join();
  std::thread ending([&] { members.end_push(); });
  EXPECT_TRUE(members.hold(b, stays).ok()) << "it waits for pushes under way";
  ending.join();
  members.release(b);
}

/// Returns the JobMembers of a server that has restarted from the image of `before`.
std::unique_ptr<JobMembers> come_back(const JobMembers& before, std::chrono::milliseconds limit) {
  auto members = std::make_unique<JobMembers>(0, 1s);
  EXPECT_TRUE(members->restore(before.image().first));
  members->expect_back(limit);
  return members;
}

TEST(JobMembers, ServerThatComesBackKnowsItsWorkersAndTheStepsThatTheyHold) {
  JobMembers first(0, 1s);
  const int a = joined(first), b = joined(first);
  EXPECT_EQ(dealt(first, a, 6).step, 0);
  EXPECT_EQ(dealt(first, b, 6).step, 1);
  EXPECT_EQ(dealt(first, a, 6).step, 2);
  const auto members = come_back(first, 60s);
  EXPECT_TRUE(members->is_empty());
  EXPECT_TRUE(members->lasts());
  const auto place = members->join(a, /*returns=*/true);
  ASSERT_TRUE(place.ok() && place->has_value()) << place.status();
  EXPECT_EQ((*place)->number, a);
  members->note(a, 1, 1);  // the worker made step 0 while the server was away
  EXPECT_EQ(dealt(*members, a, 6).step, 3) << "the step of the worker that is still away is its own";
  EXPECT_NE(joined(*members), b);
  members->leave(a);
  EXPECT_EQ(dealt(*members, joined(*members), 6).step, 2);
}

TEST(JobMembers, StepsThatAWorkerMadeWhileTheServerWasAwayAreNotDealtAgain) {
  JobMembers first(0, 1s);
  const int a = joined(first);
  for (std::int64_t step = 0; step < 3; ++step) EXPECT_EQ(dealt(first, a, 3).step, step);
  const auto members = come_back(first, 60s);
  ASSERT_TRUE(members->join(a, /*returns=*/true).ok());
  members->note(a, 2, 2);
  members->leave(a);
  const int b = joined(*members);
  EXPECT_EQ(dealt(*members, b, 3).step, 2);
  EXPECT_EQ(dealt(*members, b, 3).kind, Kind::kOwnFirst);
}

TEST(JobMembers, WorkersThatDoNotComeBackInTimeAreGivenUp) {
  JobMembers first(0, 1s);
  const int a = joined(first), b = joined(first);
  dealt(first, a, 2);
  first.begin_step(a);
  const auto members = come_back(first, 200ms);
  EXPECT_TRUE(members->join(b, /*returns=*/true).ok());
  EXPECT_TRUE(members->await(all_at(1), b, stays).ok()) << "the other one is waited for, but not for long";
  EXPECT_EQ(exit_code_of(members->join(a, /*returns=*/true).status()), ExitCode::kUnavailable);
  EXPECT_EQ(dealt(*members, b, 2).step, 0) << "its step is dealt again";
}

TEST(JobMembers, NextWorkerWritesTheResultsWhereTheOneThatWasToldToDoesNotComeBack) {
  JobMembers first(0, 1s);
  const int a = joined(first), b = joined(first);
  dealt(first, a, 1);
  first.note(a, 1, 1);
  EXPECT_TRUE(dealt(first, a, 1).finishes);
  const auto members = come_back(first, 500ms);
  EXPECT_TRUE(members->join(b, /*returns=*/true).ok());
  EXPECT_EQ(dealt(*members, b, 1).kind, Kind::kAskAgain) << "the other one may come back and write them";
  std::this_thread::sleep_for(550ms);
  EXPECT_TRUE(dealt(*members, b, 1).finishes);
}

TEST(JobMembers, NextWorkerGivesTheFirstValuesWhereTheGiverDoesNotComeBack) {
  JobMembers first(0, 1s);
  const auto giver = first.join(JobMembers::kAnyNumber);
  ASSERT_TRUE(giver.ok() && giver->has_value());
  const auto members = come_back(first, 100ms);
  const auto early = members->join(JobMembers::kAnyNumber);
  ASSERT_TRUE(early.ok());
  EXPECT_FALSE(early->has_value()) << "the giver may come back";
  std::this_thread::sleep_for(150ms);
  const auto next = members->join(JobMembers::kAnyNumber);
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_TRUE((*next)->gives_values);
}

TEST(JobMembers, StepWhoseAnswerWasLostWithTheServerIsGivenAgain) {
  JobMembers first(0, 1s);
  const int a = joined(first);
  EXPECT_EQ(dealt(first, a, 3, /*taken=*/0).step, 0);
  EXPECT_EQ(dealt(first, a, 3, /*taken=*/1).step, 1);
  const auto members = come_back(first, 60s);
  ASSERT_TRUE(members->join(a, /*returns=*/true).ok());
  EXPECT_EQ(dealt(*members, a, 3, /*taken=*/1).step, 1);
  EXPECT_EQ(dealt(*members, a, 3, /*taken=*/2).step, 2);
}

TEST(JobMembers, NumbersThatAreNoImageAreRefused) {
  JobMembers first(0, 1s);
  const int a = joined(first);
  dealt(first, a, 3);
  const std::vector<std::int64_t> image = first.image().first;
  EXPECT_TRUE(JobMembers(0, 1s).restore(image));
  for (std::size_t length = 0; length < image.size(); ++length) {
    if (length == 10) continue;  // the image of a run without workers
    EXPECT_FALSE(JobMembers(0, 1s).restore(std::span(image).first(length))) << length;
  }
}

TEST(JobMembers, RanksThatStayHaveTheirNumbers) {
  JobMembers members(2, 1s);
  const auto place = members.join(1);
  ASSERT_TRUE(place.ok() && place->has_value());
  EXPECT_EQ((*place)->number, 1);
  EXPECT_THAT(message_of(members.join(1).status()), HasSubstr("is there already"));
  for (const int wrong : {-1, 2, JobMembers::kAnyNumber})
    EXPECT_THAT(message_of(members.join(wrong).status()), HasSubstr("the run has no rank"));
  EXPECT_FALSE(members.lasts());
}

}  // namespace
}  // namespace tessera
