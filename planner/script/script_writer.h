#pragma once

// See docs/glossary.md: unit.

#include "planner/script/step_script.h"

namespace tessera {

/// Appends instructions to a StepScript, and counts the calls, bytes and times of each axis.
class ScriptWriter {
 public:
  static constexpr int kNoUnit = -1, kNoCall = -1;

  /// Makes a writer. All arguments must outlive this object.
  ScriptWriter(const MemoryPlan& plan, const MeshLinks& links, StepScript& script)
      : plan_(plan), links_(links), script_(script) {}

  const Links& links(Axis axis) const { return axis == Axis::kShard ? links_.shard : links_.replicate; }
  const Links& secondary_links() const { return links_.secondary; }
  /// Returns the number of ranks on the axis.
  int ranks(Axis axis) const;

  /// Writes that the rank works for `seconds`. `what` and `unit` name the work in a trace.
  void work(Spending spending, double seconds, const char* what, int unit = kNoUnit);
  /// Begins a call, and returns its number.
  int post(Channel channel, const CallCost& cost, const char* what, int unit = kNoUnit);
  /// Writes that the rank waits for the end of the call with this number.
  void wait(int call, Spending spending);
  /// Writes a call for whose end the rank waits at once.
  void call(Channel channel, const CallCost& cost, Spending spending, const char* what, int unit = kNoUnit) {
    wait(post(channel, cost, what, unit), spending);
  }
  /// Writes that the rank itself computes its share of a sum.
  void sum(Axis axis, const CallCost& cost, int unit);

 private:
  AxisUse& use(Axis axis) { return axis == Axis::kShard ? script_.shard : script_.replicate; }
  void count(Axis axis, const CallCost& cost);

  const MemoryPlan& plan_;
  const MeshLinks& links_;
  StepScript& script_;
};

}  // namespace tessera
