#include "planner/step_clock.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/status.h"

namespace tessera {
namespace {

std::size_t index(int number) { return static_cast<std::size_t>(number); }
std::size_t index(Channel channel) { return static_cast<std::size_t>(channel); }

bool is_of_shard_axis(Channel channel) {
  return channel == Channel::kGather || channel == Channel::kReduce || channel == Channel::kShardMeeting;
}

}  // namespace

// --- Groups ---

StepClock::StepClock(const StepScript& script, int replicas, int shards)
    : script_(script), replicas_(replicas), shards_(shards), ranks_(index(replicas) * index(shards)) {
  for (const WireCall& call : script_.calls) {
    std::vector<int>& calls = calls_[index(call.channel)];
    position_.push_back(calls.size());
    calls.push_back(static_cast<int>(position_.size()) - 1);
  }
  for (int i = 0; i < replicas_; ++i) wires_.push_back({Axis::kShard, {}, {}});
  for (int i = 0; i < shards_; ++i) wires_.push_back({Axis::kReplicate, {}, {}});
  // The ranks of a shard group are consecutive; the ranks of a replicate group have the same position in each shard
  // group.
  add_lines(Channel::kGather, replicas_, shards_, shards_, 1, 0);
  add_lines(Channel::kReduce, replicas_, shards_, shards_, 1, 0);
  add_lines(Channel::kReplicate, shards_, replicas_, 1, shards_, replicas_);
  add_lines(Channel::kShardMeeting, replicas_, shards_, shards_, 1, -1);
  add_lines(Channel::kReplicateMeeting, shards_, replicas_, 1, shards_, -1);
  add_lines(Channel::kWorld, 1, ranks(), 0, 1, -1);
}

/// `first_wire`: index of the first group's wire; -1: the channel sends nothing over a wire.
void StepClock::add_lines(Channel channel, int groups, int size, int first_stride, int stride, int first_wire) {
  first_line_[index(channel)] = lines_.size();
  for (int group = 0; group < groups; ++group) {
    Line& line = lines_.emplace_back();
    line.channel = channel;
    for (int i = 0; i < size; ++i) line.members.push_back(group * first_stride + i * stride);
    line.arrived.resize(calls_[index(channel)].size());
    if (first_wire < 0) continue;
    line.wire = first_wire + group;
    wires_[index(line.wire)].lines.push_back(static_cast<int>(lines_.size()) - 1);
    wires_[index(line.wire)].members = line.members;
  }
}

StepClock::Line& StepClock::line_of(int call, int rank) {
  const Channel channel = script_.calls[index(call)].channel;
  const int group = channel == Channel::kWorld ? 0 : is_of_shard_axis(channel) ? rank / shards_ : rank % shards_;
  return lines_[first_line_[index(channel)] + index(group)];
}

const WireCall& StepClock::call_of(const Line& line) const {
  return script_.calls[index(calls_[index(line.channel)][line.next])];
}

double StepClock::busy_s(Axis axis, int group) const {
  return wires_[index(axis == Axis::kShard ? group : replicas_ + group)].busy_s;
}

// --- Events ---

absl::Status StepClock::play(std::span<const double> starts_s, const Factor& factor, PlayRecorder* recorder) {
  reset();
  factor_ = factor ? &factor : nullptr;
  recorder_ = recorder;
  for (int rank = 0; rank < ranks(); ++rank) events_.push({starts_s[index(rank)], rank, ranks_[index(rank)].version});
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    const bool is_rank = event.id < ranks();
    const int line = event.id - ranks();
    if (event.version != (is_rank ? ranks_[index(event.id)].version : lines_[index(line)].version)) continue;
    now_s_ = event.at_s;
    if (!is_rank) {
      move_on(line);
    } else {
      if (ranks_[index(event.id)].state == State::kWorking) end_work(event.id);
      go_on(event.id);
    }
  }
  if (over_ == ranks_.size()) return absl::OkStatus();
  return make_error(ExitCode::kInternal, fmt::format("a simulated step does not end: {} of {} ranks wait for ever",
                                                     ranks_.size() - over_, ranks_.size()));
}

void StepClock::reset() {
  now_s_ = 0;
  over_ = 0;
  events_ = {};
  for (Rank& rank : ranks_) rank = Rank();
  for (Line& line : lines_) {
    std::ranges::fill(line.arrived, 0);
    line.next = 0;
    line.is_active = line.is_moving = false;
    line.version = 0;
  }
  for (Wire& wire : wires_) {
    wire.active = wire.working = 0;
    wire.load = wire.busy_s = 0;
  }
}

void StepClock::push_rank(int rank) {
  Rank& at = ranks_[index(rank)];
  ++at.version;
  if (at.speed > 0) events_.push({now_s_ + at.left_s / at.speed, rank, at.version});
}

void StepClock::push_line(int number) {
  Line& line = lines_[index(number)];
  ++line.version;
  events_.push({now_s_ + line.left_s / line.speed, ranks() + number, line.version});
}

// --- Ranks ---

/// Makes a rank follow the script until the rank works, waits, or has finished.
void StepClock::go_on(int number) {
  Rank& rank = ranks_[index(number)];
  for (; rank.next < script_.instructions.size(); ++rank.next) {
    const Instruction& next = script_.instructions[rank.next];
    if (next.kind == Instruction::Kind::kWork) {
      rank.work_s = factor_ ? next.seconds * (*factor_)(number, rank.next) : next.seconds;
      if (rank.work_s == 0) continue;
      rank.state = State::kWorking;
      rank.left_s = rank.work_s;
      rank.speed = speed_of(number);
      rank.is_stretched = rank.speed != 1;
      rank.since_s = rank.began_s = now_s_;
      count_working(number, true);
      return push_rank(number);
    }
    Line& line = line_of(next.call, number);
    const std::size_t position = position_[index(next.call)];
    if (next.kind == Instruction::Kind::kPost) {
      ++line.arrived[position];
      begin_next(line);
    } else if (line.next <= position) {
      rank.state = State::kWaiting;
      rank.call = next.call;
      rank.began_s = now_s_;
      return count_working(number, false);
    }
  }
  rank.state = State::kOver;
  count_working(number, false);
  rank.times.end_s = now_s_;
  ++over_;
}

void StepClock::end_work(int number) {
  Rank& rank = ranks_[index(number)];
  const Instruction& ended = script_.instructions[rank.next++];
  rank.times.spent_s[static_cast<std::size_t>(ended.spending)] += rank.work_s;
  if (rank.is_stretched) rank.times.stretch_s += now_s_ - rank.began_s - rank.work_s;
  if (recorder_) recorder_->span(number, 0, ended.what, ended.unit, rank.began_s, now_s_);
}

double StepClock::speed_of(int rank) const {
  const double load = wires_[index(rank / shards_)].load + wires_[index(replicas_ + rank % shards_)].load;
  return std::max(0.0, 1.0 - load);
}

/// Updates the speed of a rank that works. It is called when the load of a wire that the rank uses has changed.
void StepClock::settle_rank(int number) {
  Rank& rank = ranks_[index(number)];
  const double speed = speed_of(number);
  if (rank.state != State::kWorking || speed == rank.speed) return;
  rank.left_s = std::max(0.0, rank.left_s - rank.speed * (now_s_ - rank.since_s));
  rank.since_s = now_s_;
  rank.speed = speed;
  rank.is_stretched = true;
  push_rank(number);
}

}  // namespace tessera
