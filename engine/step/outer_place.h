#pragma once

// See docs/glossary.md: outer step.

#include <c10/core/Device.h>

#include <memory>

#include "engine/device/accelerator.h"
#include "optim/arithmetic/outer_rule.h"
#include "sharding/layout/layout.h"
#include "sharding/unit.h"

namespace tessera {

/// Where this rank's part of masters lies in outer steps, and who computes there: the CPU, or a GPU, which queues all
/// of it on the current stream. OuterSteps has one, says in which order what is done, and calls it from the thread that
/// trains. What a place computes has the same bits on both. All pointers are to memory of `device`.
class OuterPlace {
 public:
  virtual ~OuterPlace() = default;

  virtual c10::Device device() const = 0;
  /// Reads this rank's masters of a group that trains into `flat` [numel of the group's flat buffer], fp32: its
  /// optimizer part. Other elements stay as they are. Throws as for_each_state.
  virtual void read(const FlatGroup& group, float* flat) = 0;
  /// Writes this rank's parts of the group's parameters and masters from `values` [at.numel], the elements `at` of its
  /// flat buffer. Throws as for_each_state.
  virtual void write(FlatGroup& group, float* values, Extent at) = 0;
  /// Makes one pass of an outer step (outer_rule.h).
  virtual void pass(const OuterRun& run) = 0;
};

/// The place of what `accelerator` trains, which outlives it.
std::unique_ptr<OuterPlace> outer_place_of(const Accelerator& accelerator);

}  // namespace tessera
