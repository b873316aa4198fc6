#pragma once

#include <absl/status/status.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <vector>

#include "planner/script/step_script.h"

namespace tessera {

/// A listener that gets the events of a simulated StepScript. Seconds count from the beginning of the step.
class PlayRecorder {
 public:
  /// `lane`: 0 is the program of the rank, and 1 + c is Channel c of the rank's group.
  virtual void span(int rank, std::size_t lane, const char* what, int unit, double begin_s, double end_s) = 0;

 protected:
  ~PlayRecorder() = default;
};

/// The times of a rank in a step.
struct RankTimes {
  double end_s = 0;
  std::array<double, kSpendings> spent_s{};  ///< [Spending]: seconds; those of work do not include `stretch_s`
  double stretch_s = 0;                      ///< seconds by which work took longer because the wire was busy
  double spent(Spending spending) const { return spent_s[static_cast<std::size_t>(spending)]; }
};

/// An event simulation of a StepScript on replicas x shards ranks, in groups like those of a mesh.
///
/// **The wire** of a group of the shard axis is shared by its two channels. If both have a call whose bytes are being
/// transferred, each call has half the speed. Calls do not slow each other while their latencies pass. The replicate
/// axis has its own wire.
///
/// **Cores.** While bytes are transferred, the speed of a rank's work is 1 - load, but at least 0, where load is the
/// sum of WireCall::load over both wires. While some rank of a group works, the speed of transfers is 1 / (1 + drag)
/// (WireCall::drag), and the latency of a call is CallCost::busy_latency_s.
///
/// **More time for a part can shorten a step.** A gather and a reduction that are on a wire at the same time slow each
/// other. So if a gather for which no rank waits yet is delayed, a reduction for which ranks wait can become faster,
/// and the step shorter (R. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). A delay can also move a
/// transfer to a time at which it takes no cores from work. Such cases are rare in the sweep of
/// tests/planner/step_sweep_test.cc, and shorten the step by less than 5%. If neither a wire nor cores are shared, more
/// work and slower links never shorten a step.
///
/// If ranks do not differ, one rank can be simulated instead of all: a call then begins when that rank has joined it.
/// The result is exactly the same as for all ranks, since simultaneous events have an order. Events of ranks come
/// before those of calls, and calls are in the order of channels. No other order of simultaneous events matters.
///
/// The cost of a step is proportional to ranks x instructions x log(ranks + groups).
class StepClock {
 public:
  /// Returns the factor by which the seconds of an instruction's work on a rank are multiplied. A null function means
  /// 1.
  using Factor = std::function<double(int rank, std::size_t instruction)>;

  /// `script` must outlive this object.
  StepClock(const StepScript& script, int replicas, int shards);

  int ranks() const { return static_cast<int>(ranks_.size()); }

  /// Simulates the script; rank r begins at `starts_s[r]`. `recorder` may be null. Returns an error (70) if ranks wait
  /// for ever, which does not happen with scripts of script_of_step.
  absl::Status play(std::span<const double> starts_s, const Factor& factor = nullptr, PlayRecorder* recorder = nullptr);

  const RankTimes& times(int rank) const { return ranks_[static_cast<std::size_t>(rank)].times; }
  /// Returns the seconds in which some call of a group of the axis was under way.
  double busy_s(Axis axis, int group) const;

 private:
  enum class State : std::uint8_t { kStarting, kWorking, kWaiting, kOver };
  struct Rank {
    State state = State::kStarting;
    std::size_t next = 0;  ///< index of the rank's instruction
    double work_s = 0, left_s = 0, speed = 1, since_s = 0, began_s = 0;
    bool is_stretched = false;
    bool is_counted = false;  ///< whether this rank is counted as working on each of its wires
    int call = -1;            ///< the call for which the rank waits
    std::uint32_t version = 0;
    RankTimes times;
  };
  /// One channel of one group, with its calls.
  struct Line {
    Channel channel = Channel::kGather;
    std::vector<int> members;
    int wire = -1;
    std::vector<int> arrived;  ///< [position of a call in the channel]: number of ranks that have joined the call
    std::size_t next = 0;      ///< position of the next call; all calls before it have ended
    bool is_active = false, is_moving = false;
    double left_s = 0, speed = 1, since_s = 0, began_s = 0;
    std::uint32_t version = 0;
  };
  struct Wire {
    Axis axis = Axis::kShard;
    std::vector<int> lines, members;
    int active = 0, working = 0;  ///< number of calls under way on the wire; number of its ranks that work
    double load = 0, busy_since_s = 0, busy_s = 0;
  };
  /// An event of a rank or of a Line. The ids of Lines are larger than the ids of ranks. The event is outdated if the
  /// version of its rank or Line has changed since the event was created.
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
  std::vector<Wire> wires_;                        ///< first the wires of shard groups, then those of replicate groups
  std::vector<std::size_t> position_;              ///< [call]: position of the call in its channel
  std::array<std::vector<int>, kChannels> calls_;  ///< [channel]: numbers of the calls of the channel
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  const Factor* factor_ = nullptr;
  PlayRecorder* recorder_ = nullptr;
  double now_s_ = 0;
  std::size_t over_ = 0;
};

}  // namespace tessera
