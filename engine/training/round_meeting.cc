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
  throw Error(
      ExitCode::kInternal,
      "rank " + std::to_string(control_->rank()) + " " + words_of(event) + " where rank " + std::to_string(leader_) +
          " " + words_of(said) +
          ", in a first microbatch for which some rank has no batch, and that rank cannot know which to follow. "
          "[T0261] hint: let all ranks use units in one order, or give every rank a first batch, where need be "
          "with weight 0");
}

}  // namespace tessera
