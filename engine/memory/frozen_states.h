#pragma once

// See docs/glossary.md: placement, unit.

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

#include "engine/memory/state_views.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/placement.h"
#include "sharding/unit.h"

namespace tessera {

/// Returns the name of a group's element-wise state number `state`, as in Optimizer::states.
using NameOfState = c10::function_ref<const std::string&(const FlatGroup& group, std::size_t state)>;

/// A state of a frozen parameter, or the parameter's fp32 masters. A rank has its share, which is the elements of
/// FrozenStates::share_of.
struct FrozenState {
  std::string name;  ///< the name that the optimizer has for the state; empty for masters
  StateDType dtype = StateDType::kF32;
  std::int64_t numel = 0;  ///< elements of the whole state
  /// The sizes of the state, if it belongs to the whole tensor; no value if it has a number for each element.
  std::optional<std::vector<std::int64_t>> sizes;
  std::shared_ptr<const JoinedState> own;  ///< this rank's share; it never changes, so that a save may read it while
                                           ///< training continues
};

/// The states and masters that are kept for one frozen parameter.
struct FrozenParameter {
  std::vector<FrozenState> states;
  std::optional<FrozenState> master;  ///< the parameter's masters, if it is narrower than fp32
  std::int64_t updates = 0;           ///< steps in which the parameter took part
};

/// Keeps optimizer states and masters of parameters that trained and are frozen now, until they train again. (An
/// optimizer of PyTorch, too, keeps the states of a parameter that gets no gradients.) States and masters come from
/// Engine::set_trainable or from a checkpoint. The Engine owns the object, and only its thread changes it. Each rank
/// has an equal share of each state in its host's memory, so the layout and placement from which the states came do not
/// matter. The plan does not count this memory.
class FrozenStates {
 public:
  bool empty() const { return kept_.empty(); }
  /// Returns a line for the log: "the optimizer states of 3 frozen parameters ...". REQUIRES: not empty().
  std::string describe() const;
  /// Returns the states and masters that are kept for a parameter, or null.
  const FrozenParameter* find(const at::Tensor& parameter) const;
  /// Keeps `kept` for a parameter, in place of earlier states and masters.
  void put(const at::Tensor& parameter, FrozenParameter kept);
  /// Returns the elements that a rank keeps of a state of `numel` elements. No share ends inside a block of an 8-bit
  /// state, since each block has one scale.
  static Extent share_of(std::int64_t numel, int rank, int ranks);

  /// Takes this rank's shares of the fp32 masters of parameters that are about to be frozen. These parameters still
  /// belong to trainable groups of `units`, but no longer require gradients. Only parameters narrower than fp32 have
  /// such masters. `placement`: the placement of the optimizer state; `mesh`: this rank's position. It is collective
  /// over `control`.
  void keep_masters(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement placement, const MeshPosition& mesh,
                    Collectives& control);

  /// Takes this rank's share of a state of `parameter`. The state lies at `place` in `joined`.
  void keep(const at::Tensor& parameter, const std::string& name, StateDType dtype, const JoinedState& joined,
            Extent place, const Collectives& control);
  /// Takes this rank's share of a state of the whole tensor. `values`: the values of the whole state.
  void keep_tensor_state(const at::Tensor& parameter, const TensorState& state, std::span<const float> values,
                         const Collectives& control);

  /// Gives the trainable parameters of `units` the states and masters that are kept for them, and no longer keeps them.
  /// It writes this rank's parts of the states and of the masters. Where the program has written a value of the
  /// parameter meanwhile, that value becomes the master (masters_of_frozen). The function writes into `updates` the
  /// number of steps in which each of these parameters took part. A parameter that lacks a state begins anew: the
  /// missing state stays zeros, and the parameter's number of steps is 0. It is collective over `control`.
  void give_back(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                 std::map<const c10::TensorImpl*, std::int64_t>& updates);
  /// Notes from `updates` in how many steps the kept parameters took part.
  void note_updates(const std::map<const c10::TensorImpl*, std::int64_t>& updates);

 private:
  std::int64_t bytes() const;

  std::unordered_map<const c10::TensorImpl*, FrozenParameter> kept_;
};

}  // namespace tessera
