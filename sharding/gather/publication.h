#pragma once

#include <deque>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/gather/unit_keeper.h"
#include "sharding/unit.h"

namespace tessera {

/// Updated values on their way to the ranks of the shard axis, which hold copies of them, beside the rest of the update and the next
/// forward. Of transports that carry gathers by themselves (Collectives::gathers_in_background).
///
/// A group is sent on when it has been updated. Until all parts of it have come its storage refuses access, and the first operator that
/// reads it waits. All ranks have begun by then, in their steps, so a rank may also read alone.
class Publication final : public UnitKeeper {
 public:
  /// `form`: on the wire; not lossy.
  Publication(std::vector<Unit*> units, Collectives& group, WireForm form, OnFailure on_failure);
  /// Waits for what is under way. Where that has failed nobody can read the group.
  ~Publication();
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  /// Sends this rank's part of `group`, and gets the others'. Collective. REQUIRES: nothing of it is under way.
  void start(FlatGroup& group);
  /// Waits until all that was started has come.
  void finish();
  /// This process was forked: what is under way never comes.
  void give_up();

  void use(Unit& unit) override;
  void hold(Unit& unit) override { use(unit); }
  void drop(Unit& unit) override { finish(unit); }

  /// Spent so far on starting and waiting.
  double seconds() const { return seconds_; }

 private:
  struct Coming {
    FlatGroup* group;
    std::byte* memory;
    Work work;
  };
  void finish(const Unit& unit);

  const std::vector<Unit*> units_;
  Collectives& group_;
  const WireForm form_;
  std::deque<Coming> coming_;  ///< in the order in which it was started
  bool is_forked_ = false;
  double seconds_ = 0;
};

}  // namespace tessera
