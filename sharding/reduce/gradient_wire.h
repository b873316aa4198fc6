#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/unit.h"
#include "tessera/comm_hook.h"

namespace tessera {

/// Decides the form in which each group's gradients are sent: unchanged, rounded, or compressed by a GradientMethod.
/// The object also has the memory of error feedback: the parts of gradients that were not sent so far.
///
/// Reducer owns a GradientWire, and the thread that runs backward calls it.
class GradientWire {
 public:
  /// `feedback` is the memory of MemoryCategory::kFeedback, which holds zeros. This object takes all of it.
  GradientWire(const ReduceSetup& setup, std::vector<Unit*> units, Arena feedback);

  /// Makes a hook of the program make the sums of all gradients (Reducer::sum_by).
  void sum_by(const std::shared_ptr<CommHook>& hook);
  /// Turns methods on or off from the next reduction on (Reducer::use_methods).
  void use_methods(bool on, std::int64_t step);
  /// Begins the next step. The next reduction counts as the first one of a step, even if the step's number stays the
  /// same.
  void reset();

  /// These functions return the options with which the sum over the shard axis, or the replicate axis, is made.
  ReduceOptions shard_options(const FlatGroup& group, Waits waits) const;
  ReduceOptions replicate_options(const FlatGroup& group, Waits waits) const;
  /// Returns the method that makes a group's sums over the shard axis. The result is null if no method compresses the
  /// gradients, or if there is one rank, which sends nothing.
  GradientMethod* method_of(const FlatGroup& group) const;
  /// Returns the bytes that this rank sends in a reduction of the group over the shard axis. `dtype` is the dtype of
  /// the bucket, and `options` are the options of the reduction.
  std::int64_t bytes_of(const FlatGroup& group, DType dtype, const ReduceOptions& options) const;

  /// Forgets error feedback, so that it is not added to later gradients.
  void forget();
  /// Gives error feedback the values from before the step if there is a copy of them; otherwise error feedback begins
  /// anew.
  void restore();
  /// Returns the memory that holds error feedback, for every group (Reducer::kept).
  KeptGradients kept() const;

 private:
  /// A group's memory of error feedback, and the compressor that makes its sums. Members are null if there is none.
  struct Feedback {
    float* shard = nullptr;
    float* replicate = nullptr;
    std::unique_ptr<GradientMethod> method = {};
    std::int64_t wire_bytes = 0;  ///< bytes that this rank sends in a reduction by `method`
  };
  Feedback take_feedback(const FlatGroup& group, float* method_work);
  const Feedback& feedback_of(const FlatGroup& group) const;
  ReduceOptions options_with(int part, float* feedback, Waits waits) const;
  void begin_step(std::int64_t step);
  void copy();

  const ReduceSetup setup_;
  const std::vector<Unit*> units_;
  Arena memory_;
  std::vector<std::vector<Feedback>> feedback_;  ///< [unit][group]
  bool uses_methods_ = true;
  bool has_copy_ = false;  ///< whether residuals were copied before the step's first reduction
};

}  // namespace tessera
