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

/// A listener that is told what happens when a StepScript is played. Seconds count from the step's begin.
class PlayRecorder {
 public:
  /// `lane`: 0 is the rank's program, and 1 + c are the calls of Channel c of the rank's group.
  virtual void span(int rank, std::size_t lane, const char* what, int unit, double begin_s, double end_s) = 0;

 protected:
  ~PlayRecorder() = default;
};

/// The times of a rank in a step.
struct RankTimes {
  double end_s = 0;
  std::array<double, kSpendings> spent_s{};  ///< [Spending]; work, without the time that a busy wire adds to it
  double stretch_s = 0;                      ///< seconds that work took longer because the wire was busy
  double spent(Spending spending) const { return spent_s[static_cast<std::size_t>(spending)]; }
};

/// Simulates a StepScript on replicas x shards ranks, in groups like those of a mesh. It is an event simulation.
///
/// **The wire** of a group of the shard axis is shared by its two channels: if both have a call whose bytes are moving,
/// each moves at half the speed. Calls do not slow each other while their latencies pass. The replicate axis has a wire
/// of its own.
///
/// **Cores.** A rank works at 1 - load of its speed while bytes move (WireCall::load of both wires, added up), at least
/// 0. Bytes move at 1 / (1 + drag) of their speed while some rank of the group works (WireCall::drag), and a latency
///    passes as CallCost::busy_latency_s says.
///
/// **A longer part can shorten a step.** A gather and a reduction that meet on a wire slow each other. So a delay of a
/// gather that nobody waits for yet can speed up a reduction that is waited for, and thereby the step (R. Graham,
/// "Bounds on Multiprocessing Timing Anomalies", 1969); so can a delay that moves a transfer to a time at which it
/// takes no cores. Such cases are rare in the sweep of tests/planner/step_sweep_test.cc, and shorten the step by less
/// than 5%. More work and slower links never make a step shorter if neither a wire nor cores are shared.
///
/// Ranks that are alike can be simulated as one rank: a call then begins when that rank has joined it. The result is
/// the same as for all ranks, to the last bit, since simultaneous events have an order: ranks come before calls, and
/// calls in the order of channels. Nothing else depends on the order of simultaneous events.
///
/// Costs: ranks x instructions events a step; each event costs the logarithm of the number of ranks and groups.
class StepClock {
 public:
  /// The factor of the seconds of an instruction's work on a rank. A null function means 1.
  using Factor = std::function<double(int rank, std::size_t instruction)>;

  /// `script` must outlive this object.
  StepClock(const StepScript& script, int replicas, int shards);

  int ranks() const { return static_cast<int>(ranks_.size()); }

  /// Plays the script; rank r begins at `starts_s[r]`. `recorder` may be null. Errors: 70 if ranks wait for ever, which
  /// does not happen with scripts of script_of_step.
  absl::Status play(std::span<const double> starts_s, const Factor& factor = nullptr, PlayRecorder* recorder = nullptr);

  const RankTimes& times(int rank) const { return ranks_[static_cast<std::size_t>(rank)].times; }
  /// Returns the seconds in which some call of the axis was under way in a group.
  double busy_s(Axis axis, int group) const;

 private:
  enum class State : std::uint8_t { kStarting, kWorking, kWaiting, kOver };
  struct Rank {
    State state = State::kStarting;
    std::size_t next = 0;  ///< index of its instruction
    double work_s = 0, left_s = 0, speed = 1, since_s = 0, began_s = 0;
    bool is_stretched = false;
    bool is_counted = false;  ///< whether the rank is counted among those that work on its wires
    int call = -1;            ///< the call for which the rank waits
    std::uint32_t version = 0;
    RankTimes times;
  };
  /// One channel of one group, with its calls.
  struct Line {
    Channel channel = Channel::kGather;
    std::vector<int> members;
    int wire = -1;
    std::vector<int> arrived;  ///< [call]: how many ranks have joined it, by its position in the channel
    std::size_t next = 0;      ///< position of the next call; those before it are over
    bool is_active = false, is_moving = false;
    double left_s = 0, speed = 1, since_s = 0, began_s = 0;
    std::uint32_t version = 0;
  };
  struct Wire {
    Axis axis = Axis::kShard;
    std::vector<int> lines, members;
    int active = 0, working = 0;  ///< number of calls that are under way; number of members that work
    double load = 0, busy_since_s = 0, busy_s = 0;
  };
  /// An event of a rank, or of a line. The ids of lines come after the ids of ranks. The event is outdated if the
  /// version of its rank or line has changed since it was created.
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
  std::vector<Line> lines_;  ///< ordered by channel, then by group
  std::array<std::size_t, kChannels> first_line_{};
  std::vector<Wire> wires_;                        ///< wires of shard groups, then wires of replicate groups
  std::vector<std::size_t> position_;              ///< [call]: its position in its channel
  std::array<std::vector<int>, kChannels> calls_;  ///< [channel]: its calls
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  const Factor* factor_ = nullptr;
  PlayRecorder* recorder_ = nullptr;
  double now_s_ = 0;
  std::size_t over_ = 0;
};

}  // namespace tessera
