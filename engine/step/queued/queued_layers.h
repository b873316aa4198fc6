#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/step/queued/device_tables.h"
#include "engine/step/queued/queued_context.h"
#include "engine/step/rules/layer_norms.h"
#include "sharding/unit.h"

namespace tessera {

/// Computes the norms of LAMB and LARS on a GPU; all work is queued. Ranks agree on each parameter's norms between the
/// two passes of a step. If units are updated in backward, ranks agree between the two passes of each unit. The
/// parameter's rate follows from its norms. DeviceUpdate owns and calls a QueuedLayers. The norms have the same bits as
/// the norms of LayerNorms and LayerwiseUpdate on the CPU.
class QueuedLayers {
 public:
  /// This rank's optimizer part of a group.
  struct Part {
    const FlatGroup* group;
    StepArguments weights;  ///< the place of the weights
    bool is_copied;         ///< some weights are offloaded, so all weights are copied before they are added up
  };

  /// `parts`: parts of all trainable groups, in the order of units. If norms of updates are added up too, the updates
  /// lie where gradients lay before.
  QueuedLayers(const QueuedContext& context, std::span<const Part> parts, LayerNorms::Options options);

  /// Returns the memory into which the caller copies the weights of a part, if Part::is_copied. It begins with the
  /// part's first element. Parts use this memory one after another.
  float* copy() const { return copy_; }
  /// Adds up the weights that were copied to `copy`; kernels that copy them are queued already. `part`: the index of
  /// the copied part among all parts.
  void add_copied(std::size_t part) { kernels_.norm(copied_[part]); }

  /// Agrees on the norms of all units. In backward it agrees only on the norms of `unit`. It is collective. REQUIRES:
  /// the weights have not changed in this step, copied weights are added up, and updates lie where gradients lay
  /// before. `request` and `tables` belong to the decided step; the second pass uses the constants that this function
  /// writes to `tables`. Throws tessera::Error.
  void agree(std::optional<std::int32_t> unit, const StepRequest& request, const StepTables& tables);

 private:
  /// The norms on which ranks agree in one exchange.
  struct Meeting {
    const FlatGroup* first = nullptr;  ///< first group of the Meeting
    std::vector<NormTables> weights;   ///< this rank's parts, without those that are copied
    NormTables updates;
    LayerTables tables;
  };
  void add_weights(std::span<const Part> parts, Meeting& meeting);
  void add_updates(std::span<const FlatGroup* const> groups, Meeting& meeting);

  DeviceKernels& kernels_;
  const ComputeDevice device_;
  const std::shared_ptr<Collectives> world_;
  const bool by_unit_;
  DeviceTables memory_;
  float* const copy_;
  double* message_ = nullptr;       ///< [kinds][LayerTables::most_sums]: this rank's message, for one meeting at a time
  double* messages_ = nullptr;      ///< messages of all ranks
  std::vector<Meeting> meetings_;   ///< one Meeting for all units, or [unit]: one for each unit
  std::vector<NormTables> copied_;  ///< [part]: tables for weights that are copied
};

}  // namespace tessera
