#pragma once

#include <absl/status/status.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <vector>

#include "planner/step_script.h"

namespace tessera {

/// Hears what happens when a StepScript is played. Seconds count from the step's begin.
class StepRecorder {
 public:
  /// Lanes: 0 is the rank's program, 1 + c the calls of its group's Channel c.
  virtual void span(int rank, std::size_t lane, const char* what, int unit, double begin_s, double end_s) = 0;

 protected:
  ~StepRecorder() = default;
};

/// What a rank did in a step.
struct RankTimes {
  double end_s = 0;
  std::array<double, kSpendings> spent_s{};  ///< [Spending]; work without what the wire took from it
  double stretch_s = 0;                      ///< by which work took longer since the wire was busy
  double spent(Spending spending) const { return spent_s[static_cast<std::size_t>(spending)]; }
};

/// Plays a StepScript on replicas x shards ranks, in groups as a mesh's: an event simulation.
///
/// **The wire** of a group of the shard axis is shared by its two channels: where both have a call whose bytes are
/// moving, each moves at half the speed. Latencies are not shared. The replicate axis has a wire of its own.
///
/// **Cores.** While bytes move, a rank works at 1 - load of its speed (WireCall::load, both wires' added up), at least
/// 0. And while some rank of the group works, bytes move at 1 / (1 + drag) of theirs (WireCall::drag), and
/// a latency passes as CallCost::busy_latency_s says.
///
/// **More time can be less.** A gather and a reduction that meet on a wire slow each other. So what delays a gather
/// that nobody waits for yet can speed up a reduction that is waited for, and the step (R. Graham, "Bounds on
/// Multiprocessing Timing Anomalies", 1969); so can what moves a transfer to where it takes no cores. In the sweep of
/// tests/planner/step_sweep_test.cc it is rare, and below 5%. Where neither a wire nor cores are shared, more work and
/// slower links never make a step shorter.
///
/// Ranks that are alike can be played as one: then a call begins when that one has come. What it gives is that of all
/// of them to the last bit, since at one moment ranks come before calls, and calls in the order of channels, and
/// nothing else depends on which came first.
///
/// Costs: ranks x instructions events a step, each the logarithm of the number of ranks and groups.
class StepClock {
 public:
  /// By what the seconds of an instruction's work are multiplied on a rank. Null: by nothing.
  using Factor = std::function<double(int rank, std::size_t instruction)>;

  /// `script` outlives this.
  StepClock(const StepScript& script, int replicas, int shards);

  int ranks() const { return static_cast<int>(ranks_.size()); }

  /// Rank r begins at `starts_s[r]`. `recorder` may be null. Errors: 70 where ranks wait for ever, which no script of
  /// script_of_step makes them do.
  absl::Status play(std::span<const double> starts_s, const Factor& factor = nullptr, StepRecorder* recorder = nullptr);

  const RankTimes& times(int rank) const { return ranks_[static_cast<std::size_t>(rank)].times; }
  /// How long a call of the axis was under way in a group.
  double busy_s(Axis axis, int group) const;

 private:
  enum class State : std::uint8_t { kStarting, kWorking, kWaiting, kOver };
  struct Rank {
    State state = State::kStarting;
    std::size_t next = 0;  ///< instruction
    double work_s = 0, left_s = 0, speed = 1, since_s = 0, began_s = 0;
    bool is_stretched = false;
    bool is_counted = false;  ///< among those that work on its wires
    int call = -1;            ///< that it waits for
    std::uint32_t version = 0;
    RankTimes times;
  };
  /// A channel of one group.
  struct Line {
    Channel channel = Channel::kGather;
    std::vector<int> members;
    int wire = -1;
    std::vector<int> arrived;  ///< [position of the call in the channel]
    std::size_t next = 0;      ///< position; those before it are over
    bool is_active = false, is_moving = false;
    double left_s = 0, speed = 1, since_s = 0, began_s = 0;
    std::uint32_t version = 0;
  };
  struct Wire {
    Axis axis = Axis::kShard;
    std::vector<int> lines, members;
    int active = 0, working = 0;  ///< calls that are under way; members that work
    double load = 0, busy_since_s = 0, busy_s = 0;
  };
  /// Of a rank, or behind those of a line. Outdated where its version is not the one it was made for.
  struct Event {
    double at_s = 0;
    int id = 0;
    std::uint32_t version = 0;
    friend bool operator>(const Event& a, const Event& b) { return a.at_s != b.at_s ? a.at_s > b.at_s : a.id > b.id; }
  };

  void add_lines(Channel channel, int groups, int size, int first_stride, int stride, int first_wire);
  void reset();
  Line& line_of(int call, int rank);
  const WireCall& call_of(const Line& line) const;
  void push_rank(int rank);
  void push_line(int line);

  void go_on(int rank);
  void end_work(int rank);
  void settle_rank(int rank);
  double speed_of(int rank) const;

  double latency_speed(const Line& line) const;
  void begin_next(Line& line);
  void move_on(int line);
  void end_call(int line);
  void settle_line(int line, double speed);
  void share(Wire& wire);
  void count_active(Wire& wire, int change);
  void count_working(int rank, bool works);

  const StepScript& script_;
  const int replicas_, shards_;
  std::vector<Rank> ranks_;
  std::vector<Line> lines_;  ///< by channel, then by group
  std::array<std::size_t, kChannels> first_line_{};
  std::vector<Wire> wires_;                        ///< of shard groups, then of replicate groups
  std::vector<std::size_t> position_;              ///< [call] in its channel
  std::array<std::vector<int>, kChannels> calls_;  ///< by channel
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  const Factor* factor_ = nullptr;
  StepRecorder* recorder_ = nullptr;
  double now_s_ = 0;
  std::size_t over_ = 0;
};

}  // namespace tessera
