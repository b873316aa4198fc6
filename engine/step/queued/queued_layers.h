#pragma once

// See docs/glossary.md: unit.

#include <memory>
#include <span>
#include <vector>

#include "engine/step/queued/device_tables.h"
#include "engine/step/queued/queued_context.h"
#include "sharding/unit.h"

namespace tessera {

/// LAMB's and LARS's norms on a GPU, queued: ranks agree on each parameter's norms between the passes of a step, and
/// its rate follows. DeviceUpdate owns and calls it. It gives the bits of LayerNorms and LayerwiseUpdate on the CPU.
class QueuedLayers {
 public:
  /// This rank's optimizer part of a group.
  struct Part {
    const FlatGroup* group;
    DeviceRun run;   ///< weights; and the gradient's place, which has directions where they are made
    bool is_copied;  ///< some weights lie below the device's memory: all are copied before they are added up
  };

  /// `parts`: parts of all trainable groups, in the order of units. `of_directions`: whether the rule makes
  /// directions, whose norms are added up too.
  QueuedLayers(const QueuedContext& context, std::span<const Part> parts, bool of_directions);

  /// Returns where the caller copies the weights of a part that is copied, from its first element on. Parts use this
  /// place one after the other.
  float* copy() const { return copy_; }
  /// Adds up the weights that were copied to `copy`; kernels that copy them are queued. `part`: its index among all.
  void add_copied(std::size_t part);

  /// It is collective. When it is called, weights have not changed in this step, copied weights are added up, and
  /// directions are made. `request`, `tables`: those of the decided step, whose constants the second pass then uses.
  /// Throws tessera::Error.
  void agree(const StepRequest& request, const StepTables& tables);

 private:
  void add_weights(std::span<const Part> parts);
  void add_directions(std::span<const Part> parts);

  DeviceKernels& kernels_;
  const ComputeDevice device_;
  const std::shared_ptr<Collectives> world_;
  DeviceTables memory_;
  float* const copy_;
  std::vector<NormTables> norms_;   ///< this rank's parts without those that are copied
  std::vector<NormTables> copied_;  ///< [part]: for weights that are copied
  LayerTables tables_;
  double* message_ = nullptr;   ///< [kinds][most_sums]: message of this rank
  double* messages_ = nullptr;  ///< messages of all ranks
};

}  // namespace tessera
