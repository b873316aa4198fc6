#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/memory/joined_state.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/placement.h"
#include "sharding/unit.h"

namespace tessera {

/// The name of state number `state` of each element of a group: that of Optimizer::states.
using NameOfState = c10::function_ref<const std::string&(const FlatGroup& group, std::size_t state)>;

/// A state of a frozen parameter, or its fp32 masters, and this rank's share of it: the elements of FrozenStates::share_of.
struct FrozenState {
  std::string name;  ///< as an optimizer has it; of masters none
  StateDType dtype = StateDType::kF32;
  std::int64_t numel = 0;  ///< of the whole state
  std::optional<std::vector<std::int64_t>>
      sizes;                               ///< of a state of the whole tensor; nothing: a number for each element
  std::shared_ptr<const JoinedState> own;  ///< does not change, so that a save may read it beside training
};

struct FrozenParameter {
  std::vector<FrozenState> states;
  std::optional<FrozenState> master;  ///< where parameters are narrower than fp32
  std::int64_t updates = 0;           ///< steps in which it took part
};

/// Optimizer states and masters of parameters that are frozen and trained before, until they train again: as with an optimizer of
/// PyTorch, which keeps what it knows of a parameter that gets no gradients. They come from Engine::set_trainable or from a checkpoint.
/// Each rank has an equal share of each state in memory of its host, beside the plan; so neither the layout nor the placement that they
/// came from matters.
class FrozenStates {
 public:
  bool empty() const { return kept_.empty(); }
  /// "the optimizer states of 3 frozen parameters ...", for a log. REQUIRES: not empty.
  std::string describe() const;
  /// What is kept of a parameter; null where nothing is.
  const FrozenParameter* find(const at::Tensor& parameter) const;
  void put(const at::Tensor& parameter, FrozenParameter kept);
  /// The elements of a state of `numel` that a rank keeps: whole blocks of 8-bit states, which have one scale.
  static Extent share_of(std::int64_t numel, int rank, int ranks);

  /// Takes this rank's shares of the fp32 masters of parameters that train in `units`, in a narrower dtype, and do not require gradients
  /// any more. `placement`, `mesh`: the optimizer's, of this rank. Collective over `control`.
  void keep_masters(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement placement, const MeshPosition& mesh,
                    Collectives& control);

  /// Takes this rank's share of a state of `parameter`, which has `numel` elements and begins at element `begin` of `joined`.
  void keep(const at::Tensor& parameter, const std::string& name, StateDType dtype, const JoinedState& joined,
            std::int64_t begin, std::int64_t numel, const Collectives& control);
  /// Likewise of a state of the whole tensor, whose values are `values`.
  void keep_tensor_state(const at::Tensor& parameter, const TensorState& state, std::span<const float> values,
                         const Collectives& control);

  /// Writes this rank's parts of the states of trainable parameters of `units` that are kept here, and of their masters where the
  /// parameter is what rounding makes of these: else it was written meanwhile. Puts the steps in which they took part into `updates`, and
  /// forgets them. A parameter that lacks a state begins anew, with zeros. Collective over `control`.
  void give_back(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                 std::map<const c10::TensorImpl*, std::int64_t>& updates);
  /// In how many steps kept parameters took part, by `updates`.
  void note_updates(const std::map<const c10::TensorImpl*, std::int64_t>& updates);

 private:
  std::int64_t bytes() const;

  std::unordered_map<const c10::TensorImpl*, FrozenParameter> kept_;
};

}  // namespace tessera
