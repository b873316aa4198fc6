#include "engine/step_profiler.h"

#include <algorithm>

#include "engine/engine_checkpoints.h"
#include "engine/engine_state.h"
#include "runtime/border/expect.h"

namespace tessera {
namespace {

using Event = UseTimes::Event;

double seconds(UseTimes::Clock::time_point begin, UseTimes::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

bool is_alike(const std::vector<ProfileEntry>& a, const std::vector<ProfileEntry>& b) {
  return std::ranges::equal(
      a, b, [](const ProfileEntry& x, const ProfileEntry& y) { return x.unit == y.unit && x.pass == y.pass; });
}

}  // namespace

StepProfiler::StepProfiler(Engine& engine)
    : engine_(engine), had_watch_(EngineCheckpoints(engine).training().gathering.watch.has_value()) {
  Training& training = EngineCheckpoints(engine).training();
  const int ranks = training.job.mesh.world_size();
  expect(
      ranks == 1, "a profile of ", ranks,
      " ranks cannot be made: it times a rank that waits for no other. [T0299] hint: start the program with one rank");
  expect(
      !training.job.accelerator.device.is_queued,
      "a profile of a GPU cannot be made, since its operators end later than they return. [T0300] hint: profile on the "
      "CPU (comm.transport \"host\"), or with LibTorch's profiler");
  auto& [log, publication, parts, residency, watch] = training.gathering;
  expect(
      !residency,
      "a profile with offloaded parameters cannot be made. [T0301] hint: leave \"offload\": {\"parameters\": ...} out "
      "while it is made");
  for (auto& unit : training.units) unit->use_log = &*log;
  log->time_uses(&times_);
  training.times.uses = &times_;
  if (!watch) watch.emplace();
}

StepProfiler::~StepProfiler() {
  Training& training = EngineCheckpoints(engine_).training();
  training.times.uses = nullptr;
  training.gathering.log->time_uses(nullptr);
  if (had_watch_) return;
  training.gathering.watch.reset();
  for (auto& unit : training.units) unit->use_log = nullptr;
}

/// Returns the round of entries [begin, end): from a forward's first use of a unit to the end of the backward, whose
/// entry is at `end`.
StepProfiler::Round StepProfiler::round_of(const Entries& entries, std::size_t begin, std::size_t end) const {
  const auto& units = EngineCheckpoints(engine_).training().units;
  Round round;
  RoundPass pass = RoundPass::kForward;
  UseTimes::Clock::time_point from = entries[begin].at;
  for (std::size_t i = begin; i < end; ++i) {
    if (entries[i].event == Event::kBackward) {
      pass = RoundPass::kBackward;
      from = entries[i].at;  // the time of the loss is counted for the unit with which backward begins
      continue;
    }
    const UseTimes::Clock::time_point until = entries[i + 1].at;
    round.push_back({units[static_cast<std::size_t>(entries[i].unit)]->name, pass, seconds(from, until)});
    from = until;
  }
  return round;
}

void StepProfiler::end_step(bool counts) {
  const Entries entries = times_.take();
  if (!counts || entries.empty()) return;
  double working = 0, update = 0;
  // These are the indices of the first entry of the current round (none yet) and of the first entry of the step's end.
  std::size_t begin = entries.size(), step = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].event == Event::kUse && begin == entries.size()) begin = i;
    if (entries[i].event == Event::kBackwardEnd && begin < i) {
      working += seconds(entries[begin].at, entries[i].at);
      rounds_.push_back(round_of(entries, begin, i));
    }
    if (entries[i].event == Event::kStep) step = i;
    if (entries[i].event == Event::kStepEnd) update = seconds(entries[step].at, entries[i].at);
    if (entries[i].event != Event::kUse && entries[i].event != Event::kBackward) begin = entries.size();
  }
  updates_.push_back(update);
  rests_.push_back(std::max(0.0, EngineCheckpoints(engine_).training().times.last_seconds - working - update));
}

StepProfile StepProfiler::profile() const {
  expect(!rounds_.empty(),
         "a profile wants a step that counts, got none. [T0302] hint: train two steps at least: the first one does "
         "not count");
  StepProfile profile;
  profile.entries = rounds_.back();
  for (std::size_t i = 0; i < profile.entries.size(); ++i) {
    std::vector<double> all;
    for (const Round& round : rounds_) {
      if (is_alike(round, rounds_.back())) all.push_back(round[i].seconds);
    }
    profile.entries[i].seconds = median(all);
  }
  profile.update_seconds = median(updates_);
  profile.rest_seconds = median(rests_);
  for_each_trainable(EngineCheckpoints(engine_).training().units,
                     [&](const FlatGroup& group) { profile.updated_elements += group.optimizer_part.numel; });
  return profile;
}

}  // namespace tessera
