// Tests which reports prove that ranks do not make the same calls in the same order, and which reports prove nothing.

#include "runtime/comm/call_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Returns the report of one rank: the number of calls that the rank has begun in each of an Engine's two groups, and
/// in a group of the program.
WaitReport at(int rank, std::uint64_t gathers, std::uint64_t reductions, std::uint64_t barriers = 0, int ranks = 2) {
  WaitReport report;
  report.rank = rank;
  const auto group = [&](const char* family, std::uint64_t begun) {
    return WaitReport::Group{
        .first = 0, .count = ranks, .stride = 1, .family = family, .begun = begun, .threads = {1}, .latest = {}};
  };
  report.groups = {
      {"gather", group("engine", gathers)}, {"reduce", group("engine", reductions)}, {"user", group("user", barriers)}};
  return report;
}

WaitReport waiting(WaitReport report, const std::string& group, int thread = 1) {
  const std::uint64_t call = report.groups.contains(group) ? report.groups[group].begun : 0;
  const std::string text = group + " (#" + std::to_string(call) + ")";
  report.waits.push_back({group, call, thread, text});
  report.groups[group].latest[call] = text;
  return report;
}

TEST(CallOrder, RanksInCallsThatTheOtherHasNotBegunDisagree) {
  const std::string text = disagreement_of({waiting(at(0, 5, 2), "gather"), waiting(at(1, 4, 3), "reduce")});
  EXPECT_EQ(text,
            "ranks disagree: rank 0 waits in gather (#5), which rank 1 has not begun; rank 1 waits in reduce (#3), "
            "which rank 0 has not begun");
}

TEST(CallOrder, ComputingRankIsNotAccused) {
  EXPECT_EQ(disagreement_of({waiting(at(0, 5, 2), "gather"), at(1, 4, 3)}), "");
  EXPECT_EQ(disagreement_of({waiting(at(0, 5, 2), "gather")}), "");
}

// Rank 0 has ended the call in which rank 2 still waits, and rank 0 waits in its next call. All ranks have begun rank
// 2's call, so that call will end.
TEST(CallOrder, CallThatAllRanksHaveBegunIsNoDisagreement) {
  EXPECT_EQ(disagreement_of({waiting(at(0, 5, 3, 0, 3), "reduce"), waiting(at(1, 5, 3, 0, 3), "reduce"),
                             waiting(at(2, 5, 2, 0, 3), "gather")}),
            "");
  EXPECT_EQ(disagreement_of({waiting(at(0, 5, 2), "gather"), waiting(at(1, 5, 2), "gather")}), "");
}

TEST(CallOrder, RanksThatWaitInARingDisagree) {
  WaitReport a = at(0, 1, 0, 0, 3), b = at(1, 0, 1, 0, 3), c = at(2, 0, 0, 1, 3);
  a.groups["user"].begun = 0, b.groups["gather"].begun = 0, c.groups["reduce"].begun = 0;
  a.groups["reduce"].begun = 1, b.groups["user"].begun = 1, c.groups["gather"].begun = 1;  // three groups form a ring
  const std::string text = disagreement_of({waiting(a, "gather"), waiting(b, "reduce"), waiting(c, "user")});
  EXPECT_THAT(text, HasSubstr("rank 0 waits in gather (#1), which rank 1 has not begun"));
  EXPECT_THAT(text, HasSubstr("rank 2 waits in user (#1), which rank 0 has not begun"));
}

TEST(CallOrder, RankThatHasEndedBeginsNoMoreCalls) {
  WaitReport ended = at(1, 4, 2);
  ended.has_ended = true;
  EXPECT_EQ(disagreement_of({waiting(at(0, 5, 2), "gather"), ended}),
            "ranks disagree: rank 0 waits in gather (#5), which rank 1 has not begun: its program has ended");
  EXPECT_EQ(disagreement_of({waiting(at(0, 4, 2), "gather"), ended}), "") << "it has done its part of the call";
  const auto read = WaitReport::from_text(ended.to_text());
  ASSERT_TRUE(read);
  EXPECT_TRUE(read->has_ended);
  EXPECT_FALSE(WaitReport::from_text(at(1, 4, 2).to_text())->has_ended);
}

TEST(CallOrder, NonMemberIsNotWaitedForInAGroup) {
  WaitReport a = at(0, 5, 2), b = at(1, 4, 3);
  a.groups["gather"].count = b.groups["gather"].count = 1;
  EXPECT_EQ(disagreement_of({waiting(a, "gather"), waiting(b, "reduce")}), "");
}

// Each thread trains its own model, so the order of the threads' calls is random.
TEST(CallOrder, ThreadsThatShareNoGroupHaveNoCommonOrder) {
  WaitReport a = at(0, 5, 0, 2), b = at(1, 4, 0, 3);
  for (WaitReport* report : {&a, &b}) report->groups["user"].threads = {2};
  EXPECT_EQ(disagreement_of({waiting(a, "gather", 1), waiting(b, "user", 2)}), "");
  // A thread that calls both groups would call them in the program's order.
  for (WaitReport* report : {&a, &b}) report->groups["user"].threads = report->groups["gather"].threads = {1, 2};
  EXPECT_NE(disagreement_of({waiting(a, "gather", 1), waiting(b, "user", 2)}), "");
}

// Autograd's threads make an Engine's calls of backward, and the program's thread makes the calls of forward.
TEST(CallOrder, CallsOfOneEngineHaveAnOrderOnAnyThreads) {
  WaitReport a = at(0, 5, 2), b = at(1, 4, 3);
  for (WaitReport* report : {&a, &b}) report->groups["reduce"].threads = {2};
  EXPECT_NE(disagreement_of({waiting(a, "gather", 1), waiting(b, "reduce", 2)}), "");
}

TEST(CallOrder, SameNumberForDifferentCallsIsADisagreement) {
  WaitReport a = waiting(at(0, 5, 2), "gather"), b = waiting(at(1, 6, 2), "gather");
  b.groups["gather"].latest[5] = "barrier (#5)";
  EXPECT_EQ(disagreement_of({a, b}), "ranks disagree: rank 0 calls gather (#5), rank 1 calls barrier (#5)");
  b.groups["gather"].latest[5] = "gather (#5)";
  EXPECT_EQ(disagreement_of({a, b}), "");
}

TEST(CallOrder, RankThatMakesAGroupAloneIsNamed) {
  WaitReport a = at(0, 5, 2), b = at(1, 6, 2);
  a.groups["other"] = {
      .first = 0, .count = 2, .stride = 1, .family = "other", .begun = 0, .threads = {1}, .latest = {}};
  EXPECT_THAT(disagreement_of({waiting(a, "other"), waiting(b, "gather")}), HasSubstr("rank 0 waits in other (#0)"));
}

// Calls of another library are observed from outside. If no observer on a rank reports the outside calls, the rank may
// have begun any of them.
TEST(CallOrder, RankSilentAboutAnOutsideGroupIsNotAccused) {
  WaitReport a = at(0, 5, 2), b = at(1, 5, 3);
  const auto begun = [](std::uint64_t calls) {
    return WaitReport::Group{.first = 0,
                             .count = 2,
                             .stride = 1,
                             .family = "torch",
                             .begun = calls,
                             .threads = {1},
                             .is_outside = true,
                             .latest = {}};
  };
  a.groups["torch"] = begun(3);
  const auto found = [&] {
    const auto read = WaitReport::from_text(waiting(a, "torch").to_text());
    return disagreement_of({*read, waiting(b, "reduce")});
  };
  EXPECT_EQ(found(), "");
  b.groups["torch"] = begun(3);
  EXPECT_EQ(found(), "") << "it has begun the call, which may be under way";
  b.groups["torch"] = begun(2);
  EXPECT_THAT(found(), HasSubstr("rank 0 waits in torch (#3), which rank 1 has not begun"));
}

TEST(CallOrder, ReportsGoThroughTheStoreAsText) {
  const WaitReport report = waiting(at(1, 4, 3), "reduce");
  const auto read = WaitReport::from_text(report.to_text());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->to_text(), report.to_text());
  EXPECT_NE(disagreement_of({waiting(at(0, 5, 2), "gather"), *read}), "");
  for (const char* text :
       {"", "{", "[]", "7", R"({"rank": 1})", R"({"rank": "x", "groups": {}, "waits": []})",
        R"({"rank": 1, "groups": {}, "waits": [{"group": "g", "call": 1, "thread": 1, "text": ""}]})",
        R"({"rank": 1, "groups": {"g": {"ranks": [0, 2, 0]}}, "waits": []})"})
    EXPECT_FALSE(WaitReport::from_text(text).has_value()) << text;
}

}  // namespace
}  // namespace tessera
