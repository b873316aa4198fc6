#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "optim/optimizer.h"
#include "runtime/comm/mesh.h"
#include "sharding/unit.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group, and makes the new values known to the ranks
/// that hold copies of them.
class Update {
 public:
  Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
         const MeshAxes& axes);

  /// `used`: as in AgreedStep. A parameter that got no gradient on any rank is left alone, moments and all, and its
  /// bias correction counts only the steps it took part in, as in PyTorch.
  void apply(float gradient_scale, float lr, const std::vector<char>& used);

  /// Spent so far on making values known.
  double publish_seconds() const { return publish_seconds_; }

 private:
  void update_group(FlatGroup& group, StepScalars scalars, std::int64_t* steps, const char* used);
  void update_run(FlatGroup& group, const StepScalars& scalars, Extent run);
  StateSlice state_of(const FlatGroup::State& state, std::int64_t begin, std::int64_t numel) const;
  void publish(FlatGroup& group);

  const std::vector<std::unique_ptr<Unit>>& units_;
  const Optimizer& optimizer_;
  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  double publish_seconds_ = 0;
  std::vector<std::int64_t> steps_;  ///< applied, by trainable parameter
};

}  // namespace tessera
