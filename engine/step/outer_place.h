#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "engine/device/accelerator.h"
#include "optim/arithmetic/outer_rule.h"
#include "sharding/layout/layout.h"
#include "sharding/unit.h"

namespace tessera {

/// Does the computations of outer steps where this rank's part of masters lies: on the CPU, or on a GPU. On a GPU all
/// computations are queued on the current stream. OuterSteps owns an OuterPlace, decides the order, and calls it from
/// the thread that trains. Results have the same bits on the CPU and on a GPU. All pointers are to memory of `device`.
class OuterPlace {
 public:
  virtual ~OuterPlace() = default;

  virtual c10::Device device() const = 0;
  /// Reads this rank's masters of a trainable group, its optimizer part, into `flat` [numel of the group's flat
  /// buffer], fp32. Other elements do not change. Throws the errors of for_each_state.
  virtual void read(const FlatGroup& group, float* flat) = 0;
  /// Writes this rank's parts of the group's parameters and masters from `values` [at.numel], which are the elements
  /// `at` of its flat buffer. Throws the errors of for_each_state.
  virtual void write(FlatGroup& group, float* values, Extent at) = 0;
  /// Makes one pass of an outer step (outer_rule.h).
  virtual void pass(const OuterRun& run) = 0;
};

/// Returns the OuterPlace for `accelerator`, which must outlive the OuterPlace.
std::unique_ptr<OuterPlace> outer_place_of(const Accelerator& accelerator);

}  // namespace tessera
