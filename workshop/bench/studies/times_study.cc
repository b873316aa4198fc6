#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>

#include "runtime/comm/mesh_groups.h"
#include "tessera/span.h"
#include "workshop/bench/studies/gpt_session.h"
#include "workshop/bench/studies/rank_samples.h"
#include "workshop/bench/studies/studies.h"

namespace tessera::app {
namespace {

constexpr int kWarmUp = 2;  ///< steps of a turn that are not counted: another Engine ran before

std::atomic<std::int64_t> ranges_seen = 0;

std::unique_ptr<at::ObserverContext> count_range(const at::RecordFunction&) {
  ranges_seen.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

/// Observes this thread's ranges as long as the object exists.
class Observer {
 public:
  Observer() {
    const std::unordered_set<at::RecordScope> scopes = {at::RecordScope::USER_SCOPE};
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&count_range).scopes(scopes));
  }
  ~Observer() { at::removeCallback(handle_); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

 private:
  at::CallbackHandle handle_;
};

/// The measurements that are on in a turn, and the Engine that makes its steps.
struct Turn {
  const char* name;
  int session;
  bool ranges, profiler;
};
constexpr std::array<Turn, 5> kTurns = {{{"nothing told", 0, false, false},
                                         {"nothing told, another", 1, false, false},
                                         {"ranges", 0, true, false},
                                         {"all", 2, true, false},
                                         {"all, with a profiler", 2, true, true}}};

/// One case under one strategy.
class TimesStudy {
 public:
  TimesStudy(const Mesh& mesh, const TimesCase& what, const Strategy& strategy)
      : world_(value_or_throw(groups_of(mesh).axes(1, mesh.world_size())).world), steps_(what.steps) {
    for (auto& session : sessions_) session.emplace(mesh, what.model, strategy);
    sessions_[2]->engine().time_data();
    sessions_[2]->engine().time_calls();
    listener_ = Trace::listener();
  }
  ~TimesStudy() { Trace::tell(listener_); }
  TimesStudy(const TimesStudy&) = delete;
  TimesStudy& operator=(const TimesStudy&) = delete;

  /// Each round begins with another turn, so that no turn always follows the same other turn.
  void time(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (std::size_t i = 0; i < kTurns.size(); ++i) take((i + static_cast<std::size_t>(round)) % kTurns.size());
    }
    for (Samples& each : samples_) agree_on_samples(*world_, each, larger);
  }

  void add_to(BenchTable& table, const std::string& name) const {
    for (std::size_t i = 0; i < kTurns.size(); ++i) {
      const Samples& each = samples_[i];
      table.rows.push_back({name + ": " + kTurns[i].name, each.median_s(), each.quantile_s(0.1), each.quantile_s(0.9),
                            ratio_by_turns(each, samples_[0], static_cast<std::size_t>(steps_)) - 1});
    }
  }

 private:
  void take(std::size_t number) {
    const Turn& turn = kTurns[number];
    throw_if_error(world_->barrier("turn").wait());  // ranks that are threads share one listener
    Trace::tell(turn.ranges ? listener_ : nullptr);
    throw_if_error(world_->barrier("turn").wait());
    std::optional<Observer> observer;
    if (turn.profiler) observer.emplace();
    GptSession& session = *sessions_[static_cast<std::size_t>(turn.session)];
    for (int step = -kWarmUp; step < steps_; ++step) {
      const SampleClock::time_point begin = SampleClock::now();
      session.engine().backward(session.loss());
      session.engine().step();
      if (step >= 0) samples_[number].ns.push_back(nanoseconds_since(begin));
    }
  }

  const std::shared_ptr<Collectives> world_;
  const int steps_;
  std::array<std::optional<GptSession>, 3> sessions_;
  const Trace::Listener* listener_ = nullptr;
  std::array<Samples, kTurns.size()> samples_;
};

}  // namespace

std::vector<TimesCase> times_cases(bool small) {
  if (small)
    return {{"2 layers of width 64", {.vocab_size = 256, .seq_len = 32, .layers = 2, .width = 64, .heads = 4}, 3}};
  return {{"24 layers of width 64", {.vocab_size = 256, .seq_len = 256, .layers = 24, .width = 64, .heads = 4}, 10},
          {"GPT of 69 M", {.vocab_size = 8192, .seq_len = 128, .layers = 8, .width = 768, .heads = 12}, 2}};
}

BenchTable study_times(const Mesh& mesh, const std::vector<TimesCase>& cases, int rounds) {
  BenchTable table{{"step", "median_s", "p10_s", "p90_s", "over_plain_fraction"}, {}};
  for (const TimesCase& each : cases) {
    for (const bool shares : {true, false}) {
      Strategy strategy;
      strategy.strategy = ShardingStrategy::kFullShard;
      strategy.units.classes = {"Block"};
      strategy.host_sharing = shares;
      TimesStudy study(mesh, each, strategy);
      study.time(rounds);
      study.add_to(table, each.name + (shares ? "" : ", private copies"));
    }
  }
  return table;
}

}  // namespace tessera::app
