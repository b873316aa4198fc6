#include "engine/training/round_meeting.h"

#include <cstdint>
#include <string>

#include "runtime/border/throw.h"
#include "sharding/round_log.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string words_of(int event) {
  switch (event) {
    case RoundLog::kBackward:
      return "begins a backward";
    case RoundLog::kReduction:
      return "reduces gradients";
    case RoundLog::kEnd:
    case RoundLog::kEndOfLoss:
      return "ends a backward";
    case RoundLog::kBesides:
      return "uses two units at once";
    default:
      return "uses unit number " + std::to_string(event);
  }
}

}  // namespace

int RoundMeeting::next() {
  std::int32_t event = 0;
  throw_if_error(control_->broadcast("what comes next", &event, sizeof event, leader_).wait());
  return event;
}

void RoundMeeting::meet(int event) {
  std::int32_t said = event;
  throw_if_error(control_->broadcast("what comes next", &said, sizeof said, leader_).wait());
  if (said == event) return;
  throw Error(ExitCode::kInternal,
              "rank " + std::to_string(control_->rank()) + " " + words_of(event) + " where rank " +
                  std::to_string(leader_) + " " + words_of(said) +
                  ", in the first microbatch of ranks of which one has no batch, so it cannot know which to follow. "
                  "[T0261] hint: give every rank one batch at least, if a first one with weight 0");
}

}  // namespace tessera
