#pragma once

#include <memory>
#include <utility>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Tells a rank without a batch the collectives of the ranks with a batch, if it has not yet seen a microbatch itself.
/// Ranks with a batch meet that rank just before every event of their RoundLog, and one of them says which event it is.
/// Such a meeting is collective over all ranks at each event, so it is used only for a first microbatch; afterwards the
/// rank knows the events.
class RoundMeeting {
 public:
  /// `leader`: the rank that tells the others which event comes next; it has a batch.
  RoundMeeting(std::shared_ptr<Collectives> control, int leader) : control_(std::move(control)), leader_(leader) {}

  /// A rank with a batch calls it just before it performs `event`. Throws tessera::Error (70) if the
  /// leader is about to do something else.
  void meet(int event);
  /// A rank without a batch calls it, and gets the next event.
  int next();

 private:
  const std::shared_ptr<Collectives> control_;
  const int leader_;
};

}  // namespace tessera
