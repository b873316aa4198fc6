#include "planner/modes/mode_clock.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

namespace tessera {
namespace {

using ComputeSeconds = std::function<double(int, std::int64_t)>;
using Moment = std::pair<double, int>;  // seconds and rank
using Moments = std::priority_queue<Moment, std::vector<Moment>, std::greater<>>;

class ModePlayer {
 public:
  ModePlayer(const ModeRun& run, const ComputeSeconds& compute_s)
      : run_(run), compute_s_(compute_s), under_way_(static_cast<std::size_t>(run.ranks)) {}

  ModeTimeline play() {
    switch (run_.rule.kind) {
      case ModeRule::Kind::kMeeting:
        meet();
        break;
      case ModeRule::Kind::kAsynchronous:
        run_.rule.max_staleness == 0 ? push_in_rounds() : push_freely();
        break;
      case ModeRule::Kind::kBackups:
        take_the_first();
        break;
    }
    std::ranges::stable_sort(all_.steps, {}, [](const ModeStep& step) { return Moment(step.pushed_s, step.rank); });
    return std::move(all_);
  }

 private:
  /// Begins the rank's next step, and returns it with its times up to the end of compute. The push begins at that time,
  /// if the rank waits for no other rank.
  ModeStep& begin(int rank, double now_s, double pull_s) {
    ModeStep& step = under_way_[static_cast<std::size_t>(rank)];
    step = {rank, step.step + 1, now_s, now_s + pull_s};
    step.computed_s = step.pushing_s = step.pulled_s + compute_s_(rank, step.step);
    return step;
  }

  void end(ModeStep step, double pushing_s, double pushed_s) {
    step.pushing_s = pushing_s;
    step.pushed_s = pushed_s;
    all_.steps.push_back(step);
  }

  /// Returns the fragment whose turn is at the end of a step; nothing if no fragment has its turn there.
  std::optional<std::size_t> turn_at(std::int64_t step, std::int64_t fragments) const {
    const std::int64_t every = run_.rule.every, place = (step - 1) % every + 1;
    // Only the fragment with this number, from 1, can have its turn at `place`.
    const std::int64_t number = (place * fragments + every - 1) / every;
    if (number * every / fragments != place) return std::nullopt;
    return static_cast<std::size_t>(number - 1);
  }

  void meet() {
    const std::int64_t delay = run_.rule.delay;
    std::vector<FragmentCosts> fragments = run_.costs.fragments;
    if (fragments.empty()) fragments.push_back({run_.costs.meet_s, 0});
    std::vector<double> at_s(under_way_.size(), 0.0);
    std::size_t sent = fragments.size() - 1;  // the fragment whose sum began last
    double sent_s = 0;                        // when that sum began
    std::int64_t arrives = delay;             // the step at whose end ranks wait for that sum
    for (std::int64_t number = 1; number <= run_.steps; ++number) {
      double computed_s = 0, pushed_s = 0;  // when the last rank has computed, and when the last rank continues
      for (int rank = 0; rank < run_.ranks; ++rank)
        computed_s = std::max(computed_s, begin(rank, at_s[static_cast<std::size_t>(rank)], 0).computed_s);
      const std::optional<std::size_t> turn = turn_at(number, std::ssize(fragments));
      if (turn && delay == 0) std::tie(sent, sent_s, arrives) = std::tuple(*turn, computed_s, number);
      for (const ModeStep& step : under_way_) {
        const bool meets = number == arrives;
        const double pushing_s = meets ? std::max(step.computed_s, sent_s) : step.computed_s;
        double& end_s = at_s[static_cast<std::size_t>(step.rank)];
        end_s = meets ? std::max(pushing_s, sent_s + fragments[sent].sum_s) + fragments[sent].publish_s
                      : pushing_s + run_.costs.push_s;
        pushed_s = std::max(pushed_s, end_s);
        end(step, pushing_s, end_s);
      }
      if (turn && delay > 0) std::tie(sent, sent_s, arrives) = std::tuple(*turn, pushed_s, number + delay);
    }
  }

  /// Simulates max_staleness 0: no rank pushes before all ranks have computed. Then ranks push one after the other.
  void push_in_rounds() {
    double now_s = 0;
    for (std::int64_t number = 1; number <= run_.steps; ++number) {
      double last_s = 0;
      for (int rank = 0; rank < run_.ranks; ++rank)
        last_s = std::max(last_s, begin(rank, now_s, run_.costs.pull_s).computed_s);
      now_s = last_s;
      for (const ModeStep& step : under_way_) {
        end(step, now_s, now_s + run_.costs.push_s);
        now_s += run_.costs.push_s;
      }
    }
  }

  void push_freely() {
    const std::optional<std::int64_t> most = run_.rule.max_staleness;
    std::map<std::int64_t, int> ranks_at = {{0, run_.ranks}};  // [steps]: number of ranks that made so many steps
    std::set<int> waiting;
    for (int rank = 0; rank < run_.ranks; ++rank) waiting.insert(rank);
    std::int64_t left = run_.steps * run_.ranks;
    double now_s = 0;
    Moments pushed;
    for (;;) {
      const std::int64_t slowest = ranks_at.begin()->first;
      for (auto each = waiting.begin(); left > 0 && each != waiting.end();) {
        const int rank = *each;
        if (most && under_way_[static_cast<std::size_t>(rank)].step - *most > slowest) {
          ++each;
          continue;
        }
        const ModeStep& step = begin(rank, now_s, run_.costs.pull_s);
        pushed.emplace(step.computed_s + run_.costs.push_s, rank);
        each = waiting.erase(each);
        --left;
      }
      if (pushed.empty()) return;
      const auto [pushed_s, rank] = pushed.top();
      pushed.pop();
      now_s = pushed_s;
      const ModeStep& step = under_way_[static_cast<std::size_t>(rank)];
      end(step, step.computed_s, now_s);
      const auto before = ranks_at.find(step.step - 1);
      if (--before->second == 0) ranks_at.erase(before);
      ++ranks_at[step.step];
      waiting.insert(rank);
    }
  }

  void take_the_first() {
    const auto needed = static_cast<std::size_t>(run_.ranks - run_.rule.spare);
    std::vector<std::int64_t> over_at_begin(under_way_.size(), 0);
    Moments computed;
    std::int64_t over = 0;
    const auto start = [&](int rank, double now_s) {
      over_at_begin[static_cast<std::size_t>(rank)] = over;
      computed.emplace(begin(rank, now_s, run_.costs.pull_s).computed_s, rank);
    };
    for (int rank = 0; rank < run_.ranks; ++rank) start(rank, 0);
    double opened_s = 0;  // the time at which the present step began
    std::vector<int> arrived;
    while (over < run_.steps) {
      const auto [now_s, rank] = computed.top();
      computed.pop();
      if (over_at_begin[static_cast<std::size_t>(rank)] < over) {
        ++all_.dropped;
        start(rank, std::max(now_s, opened_s));
        continue;
      }
      arrived.push_back(rank);
      if (arrived.size() < needed) continue;
      ++over;
      opened_s = now_s + run_.costs.meet_s;
      for (const int each : arrived) {
        end(under_way_[static_cast<std::size_t>(each)], now_s, opened_s);
        if (over < run_.steps) start(each, opened_s);
      }
      arrived.clear();
    }
    all_.dropped += static_cast<std::int64_t>(computed.size());
  }

  const ModeRun& run_;
  const ComputeSeconds& compute_s_;
  std::vector<ModeStep> under_way_;  ///< [rank]: its latest step
  ModeTimeline all_;
};

}  // namespace

std::vector<ModeEvent> ModeTimeline::events() const {
  std::vector<std::tuple<double, std::int64_t, int, bool>> moments;  // the last member: whether it is a push
  for (const ModeStep& step : steps) {
    moments.emplace_back((step.begin_s + step.pulled_s) / 2, step.step, step.rank, false);
    moments.emplace_back((step.pushing_s + step.pushed_s) / 2, step.step, step.rank, true);
  }
  std::ranges::sort(moments);
  std::vector<ModeEvent> events;
  for (const auto& [at_s, step, rank, is_push] : moments) events.push_back({rank, step, is_push});
  return events;
}

std::vector<std::int64_t> ModeTimeline::ages() const {
  std::vector<std::int64_t> found;
  std::map<int, std::int64_t> seen;  // [rank]: pushes until the rank's newest pull
  std::int64_t pushes = 0;
  for (const ModeEvent& event : events()) {
    if (event.is_push) {
      found.push_back(pushes++ - seen[event.rank]);
    } else {
      seen[event.rank] = pushes;
    }
  }
  return found;
}

ModeTimeline play_mode(const ModeRun& run, const std::function<double(int rank, std::int64_t step)>& compute_s) {
  return ModePlayer(run, compute_s).play();
}

}  // namespace tessera
