#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/memory/joined_state.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/placement.h"
#include "sharding/unit.h"

namespace tessera {

/// Optimizer states and masters of parameters that Engine::set_trainable froze, until they train again: as with an optimizer of PyTorch, which keeps
/// what it knows of a parameter that gets no gradients. Each rank has an equal share of each state in memory of its host, beside the
/// plan; so neither the layout nor the placement that they came from matters.
class FrozenStates {
 public:
  bool empty() const { return kept_.empty(); }
  std::size_t parameters() const { return kept_.size(); }
  /// What this rank keeps.
  std::int64_t bytes() const;
  void clear() { kept_.clear(); }

  /// Takes this rank's shares of the fp32 masters of parameters that train in `units`, in a narrower dtype, and do not require gradients
  /// any more. `placement`, `mesh`: the optimizer's, of this rank. Collective over `control`.
  void keep_masters(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement placement, const MeshPosition& mesh,
                    Collectives& control);

  /// Takes this rank's share of a state of `parameter`, which has `numel` elements and begins at element `begin` of `joined`. States of a
  /// parameter come in order.
  void keep(const c10::TensorImpl* parameter, StateDType dtype, const JoinedState& joined, std::int64_t begin,
            std::int64_t numel, const Collectives& control);
  /// Likewise of a state of the whole tensor.
  void keep_tensor_state(const c10::TensorImpl* parameter, std::span<const float> values, const Collectives& control);

  /// Writes this rank's parts of the states of trainable parameters of `units` that are kept here, and of their masters where the
  /// parameter is what rounding makes of these: else it was written meanwhile. Puts the steps in which they took part into `updates`, and
  /// forgets them. Collective over `control`.
  void give_back(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control,
                 std::map<const c10::TensorImpl*, std::int64_t>& updates);
  /// In how many steps kept parameters took part, by `updates`.
  void note_updates(const std::map<const c10::TensorImpl*, std::int64_t>& updates);

 private:
  struct Share {
    StateDType dtype = StateDType::kF32;
    std::int64_t numel = 0;  ///< of the whole state
    JoinedState own;
  };
  struct Parameter {
    std::vector<Share> states, tensor_states;
    std::optional<Share> master;
    std::int64_t updates = 0;
  };

  static Share share_of(StateDType dtype, const JoinedState& joined, std::int64_t begin, std::int64_t numel,
                        const Collectives& control);
  static Share share_of(std::span<const float> values, const Collectives& control);
  static JoinedState join(const Share& share, Collectives& control);

  std::unordered_map<const c10::TensorImpl*, Parameter> kept_;
};

}  // namespace tessera
