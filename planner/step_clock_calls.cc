// This file handles the calls of a StepClock: it begins calls, shares wires among calls, and lets ranks continue when
// calls end.

#include <algorithm>
#include <utility>

#include "planner/step_clock.h"

namespace tessera {
namespace {

std::size_t index_of(int number) { return static_cast<std::size_t>(number); }

}  // namespace

/// Returns the speed at which the latency of a Line's call passes. The speed is 1 while a rank of the wire works. While
/// no rank works, the speed is higher, if the call has a longer latency while ranks work (CallCost::busy_latency_s).
double StepClock::latency_speed(const Line& line) const {
  constexpr double kAtOnce = 1e12;
  const CallCost& cost = call_of(line).cost;
  if (line.wire < 0 || cost.busy_latency_s <= cost.latency_s || wires_[index_of(line.wire)].working > 0) return 1;
  return cost.latency_s > 0 ? cost.busy_latency_s / cost.latency_s : kAtOnce;
}

/// Begins the channel's next call if all ranks have joined it, and the previous call has ended.
void StepClock::begin_next(Line& line) {
  if (line.is_active || line.next == line.arrived.size() ||
      line.arrived[line.next] < static_cast<int>(line.members.size()))
    return;
  line.is_active = true;
  const CallCost& cost = call_of(line).cost;
  line.left_s = line.wire < 0 ? cost.latency_s : std::max(cost.latency_s, cost.busy_latency_s);
  line.speed = latency_speed(line);
  line.since_s = line.began_s = now_s_;
  if (line.wire >= 0) count_active(wires_[index_of(line.wire)], 1);
  push_line(static_cast<int>(&line - lines_.data()));
}

/// Begins the transfer of a Line's call, or ends the call. It is called when the latency of the call has passed, or
/// when the bytes of the call were transferred.
void StepClock::move_on(int number) {
  Line& line = lines_[index_of(number)];
  const double transfer_s = call_of(line).cost.transfer_s;
  if (line.is_moving || transfer_s == 0) return end_call(number);
  line.is_moving = true;
  line.left_s = transfer_s;
  line.since_s = now_s_;
  if (line.wire < 0) return push_line(number);
  line.speed = 0;  // the call does not use the wire yet
  share(wires_[index_of(line.wire)]);
}

void StepClock::end_call(int number) {
  Line& line = lines_[index_of(number)];
  const WireCall& call = call_of(line);
  const int ended = calls_[static_cast<std::size_t>(line.channel)][line.next];
  ++line.next;
  ++line.version;
  line.is_active = false;
  if (line.wire >= 0) {
    Wire& wire = wires_[index_of(line.wire)];
    if (line.is_moving) {
      line.is_moving = false;
      share(wire);
    }
    count_active(wire, -1);
  }
  line.is_moving = false;
  for (const int member : line.members) {
    if (recorder_)
      recorder_->span(member, 1 + static_cast<std::size_t>(line.channel), call.what, call.unit, line.began_s, now_s_);
    Rank& rank = ranks_[index_of(member)];
    if (rank.state != State::kWaiting || rank.call != ended) continue;
    const Instruction& wait = script_.instructions[rank.next++];
    rank.times.spent_s[static_cast<std::size_t>(wait.spending)] += now_s_ - rank.began_s;
    if (recorder_ && now_s_ > rank.began_s) recorder_->span(member, 0, wait.what, wait.unit, rank.began_s, now_s_);
    go_on(member);
  }
  begin_next(line);
}

/// Updates speeds and loads. It is called when a Line of the wire begins or stops transferring bytes. It is also called
/// when the first rank of the wire begins to work, or the last rank stops working.
void StepClock::share(Wire& wire) {
  const auto is_moving = [&](int line) { return lines_[index_of(line)].is_moving; };
  const auto moving = std::ranges::count_if(wire.lines, is_moving);
  double load = 0;
  for (const int number : wire.lines) {
    const Line& line = lines_[index_of(number)];
    if (line.is_active && !line.is_moving) settle_line(number, latency_speed(line));
    if (!line.is_moving) continue;
    const WireCall& call = call_of(line);
    const double speed = 1.0 / static_cast<double>(moving) / (wire.working > 0 ? 1 + call.drag : 1);
    settle_line(number, speed);
    load += speed * call.load;
  }
  if (load == wire.load) return;
  wire.load = load;
  for (const int member : wire.members) settle_rank(member);
}

void StepClock::settle_line(int number, double speed) {
  Line& line = lines_[index_of(number)];
  if (speed == line.speed) return;
  line.left_s = std::max(0.0, line.left_s - line.speed * (now_s_ - line.since_s));
  line.since_s = now_s_;
  line.speed = speed;
  push_line(number);
}

/// Counts, on both wires of a rank, that the rank begins or stops working. Between two pieces of work that follow each
/// other at once, the rank is counted as working.
void StepClock::count_working(int number, bool works) {
  Rank& rank = ranks_[index_of(number)];
  if (std::exchange(rank.is_counted, works) == works) return;
  for (const int wire : {number / shards_, replicas_ + number % shards_}) {
    Wire& at = wires_[index_of(wire)];
    const bool worked = at.working > 0;
    at.working += works ? 1 : -1;
    if (worked != (at.working > 0)) share(at);
  }
}

void StepClock::count_active(Wire& wire, int change) {
  if (wire.active == 0) wire.busy_since_s = now_s_;
  wire.active += change;
  if (wire.active == 0) wire.busy_s += now_s_ - wire.busy_since_s;
}

}  // namespace tessera
