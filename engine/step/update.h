#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/step/publisher.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group, and makes the new values known to the ranks
/// that hold copies of them. On the CPU; a GPU's is QueuedStep.
class Update {
 public:
  Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
         const MeshAxes& axes);

  /// `used`: as in AgreedStep. A parameter that got no gradient on any rank is left alone, moments and all, and its
  /// bias correction counts only the steps it took part in, as in PyTorch.
  void apply(float gradient_scale, float lr, const std::vector<char>& used);

  /// How often each trainable parameter was updated: what its bias correction counts.
  void write_counts(std::map<const c10::TensorImpl*, std::int64_t>& counts) const;
  void read_counts(const std::map<const c10::TensorImpl*, std::int64_t>& counts);

  /// Spent so far on making values known.
  double publish_seconds() const { return publisher_.seconds(); }

 private:
  void update_group(FlatGroup& group, StepScalars scalars, std::int64_t* steps, const char* used);
  void update_run(const FlatGroup& group, const StepScalars& scalars, Extent run) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  const Optimizer& optimizer_;
  const StateDType state_dtype_;
  Publisher publisher_;
  std::vector<std::int64_t> steps_;  ///< applied, by trainable parameter
};

}  // namespace tessera
