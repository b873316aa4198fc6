#pragma once

// See docs/glossary.md: closed unit, keeper, publication, residency, slot, unit.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sharding/layout/chunks.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/layout/plan/record_layout.h"
#include "sharding/layout/shapes.h"

namespace tessera {

class GatherLog;
class TierCarrier;
class Unit;
class UnitKeeper;

/// A parameter of the user's module, and the place of its values.
struct FlatParameter {
  static constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);

  at::Tensor tensor;                         ///< the user's tensor; its TensorImpl never changes
  std::string name;                          ///< the first name under which the parameter was found, such as
                                             ///< "layers.3.attention.weight"
  std::vector<std::string> aliases;          ///< further names of a tied parameter
  std::vector<std::int64_t> sizes, strides;  ///< strides as the module made them, if dense
  std::int64_t numel = 0;
  std::uint64_t hash = 0;        ///< hash of this rank's part, under "check.values"; 0: not computed
  std::uint32_t version = 0;     ///< version of `tensor` that the Engine noted last
  std::size_t group = kNoGroup;  ///< index among OptimizerConfig::groups
  bool is_embedding = false;     ///< whether the parameter belongs to an Embedding or EmbeddingBag
  /// Number of the parameter among all parameters of the module, in the order of registration. It does not depend on
  /// units.
  std::int64_t number = 0;
};

/// A state that an optimizer keeps for a whole tensor.
struct TensorState {
  std::string name;
  std::vector<std::int64_t> sizes;
};

/// The offloaded records of one kind of state of a group.
struct RecordsBelow {
  std::int64_t first_record = 0;         ///< number of the first of these records, counted over all groups
  std::shared_ptr<TierCarrier> carrier;  ///< holds the records; null if all state is in memory
};

/// The records of a group's parameters.
struct ParametersBelow : RecordsBelow {
  Chunks chunks;  ///< how `shard` is cut into chunks
};

/// This rank's part of the states of whole tensors (GroupShape::tensor_states). Either all of it is offloaded, or none.
struct TensorStateMemory {
  std::vector<TensorState> shapes;  ///< [state of the layout]: its shape
  Extent part;                      ///< this rank's extent in the buffer of these states
  float* data = nullptr;            ///< [part], fp32; null while the states are offloaded
  std::int64_t record = -1;         ///< the record that has all of this rank's part; -1: the part is in memory
  std::shared_ptr<TierCarrier> below;
};

/// Parameters of one unit with one dtype, in one flat buffer. Either all of them train, or all are frozen, and all are
/// updated in the same way. Each of these fields points to the memory of one kind of state:
///
///   full     [numel]              dtype   gathered; the parameters are views of it. Null while released
///   shard    [parameter_part]     dtype   this rank's part (inside `full` if `full` is permanent)
///   master   [optimizer_part]     fp32    what the optimizer updates; null where dtype is fp32 and `shard` is the
///                                         master, or split into `shard` and `master_low` where master_kind says so
///   state    [optimizer_part]     fp32, bf16 or 8 bits with scales    what the optimizer keeps
///   of_tensors [of_tensors.part]  fp32    states of whole tensors, of shapes of their own
///   gradient [gradient_part]      fp32    sums over ranks and microbatches
///
/// A part of shard, master and state may be offloaded (`parameters_below`, `records`). The pointers then point to the
/// first elements, which are in memory. `engine/memory/state_views.h` gives access to both parts.
///
/// All parts are extents of the same layout. Memory belongs to the engine's arenas.
struct FlatGroup : GroupShape {
  Unit* unit = nullptr;
  std::size_t index = 0;  ///< index among the unit's groups
  std::vector<FlatParameter> parameters;
  c10::intrusive_ptr<c10::StorageImpl> storage;
  c10::Device device = c10::Device(c10::kCPU);  ///< device of all memory of the group

  Extent parameter_part, gradient_part, optimizer_part;
  std::byte* full = nullptr;
  std::byte* shard = nullptr;
  MasterKind master_kind = MasterKind::kF32;
  float* master = nullptr;             ///< kF32
  std::int16_t* master_low = nullptr;  ///< low halves of masters, under kSplitBF16 (optim/arithmetic/rounding.h)
  struct State {
    std::byte* data = nullptr;
    float* scales = nullptr;  ///< null unless the state has 8 bits
    /// True if this is memory of the host even if a GPU trains, since ranks have common parameters
    /// (SyncConfig::has_common_parameters). Otherwise this is memory of `device`.
    bool is_on_host = false;
  };
  std::array<State, kMostStates> state{};  ///< one entry for each of Optimizer::states
  RecordLayout records;                    ///< how offloaded masters and states are cut into records
  RecordsBelow states_below;               ///< the records of offloaded masters and states
  ParametersBelow parameters_below;
  float* gradient = nullptr;
  TensorStateMemory of_tensors;

  /// Returns a copy with the parts and memory only: the copy does not refer to the module or to a unit.
  FlatGroup without_module() const;

  /// Returns the address of element `element` of the tensor states. REQUIRES: the element is in this rank's part.
  float* tensor_state_at(std::int64_t element) const { return of_tensors.data + (element - of_tensors.part.offset); }

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_of(dtype)); }
  /// Returns the address of this rank's part in `full`.
  std::byte* part_in_full() const { return full + parameter_part.offset * element_bytes(); }
  const GroupShape& shape() const { return *this; }

  /// Makes the parameters point to `memory` [layout.numel()], or to no memory if `memory` is null. REQUIRES: `storage`
  /// is made (make_storage).
  void attach(std::byte* memory);
  /// Makes the parameters' storage return its pointer if Unit::lets_read is true. Otherwise the storage throws a
  /// c10::Error with the reason, unless pointers are observed (observed_pointers.h).
  void set_access();
  void point_at(std::byte* memory);  ///< sets `memory` as the data of the storage, but not of the parameters
  /// Makes the storage of all parameters of this group, without memory yet.
  void make_storage();
  /// Returns the part of `shard` that the optimizer updates, in the parameters' dtype; null if there is no shard.
  std::byte* updated() const;
  std::string refusal;  ///< text of the error for code that reads a parameter that is not gathered
};

/// Parameters that are gathered together. The Engine owns its units; tensors may outlive them. One thread at a time
/// uses a unit.
///
/// | state     | full buffers | left by                                   |
/// |-----------|--------------|-------------------------------------------|
/// | kReleased | none         | Residency::gather -> kGathering           |
/// | kGathering| being filled | Residency::wait -> kGathered              |
/// | kGathered | valid        | Residency::release -> kReleased           |
///
/// Units with replicated parameters are always kGathered and have no Residency. (A Publication may bring their updated
/// values.)
class Unit {
 public:
  enum class State : std::uint8_t { kReleased, kGathering, kGathered };

  Unit(int index, std::string name) : index(index), name(std::move(name)) {}
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const int index;
  const std::string name;
  std::vector<std::unique_ptr<FlatGroup>> groups;

  State state() const { return state_; }
  /// Changes the state. No other code changes it. Throws if `next` is the present state, and if a gathered unit would
  /// become kGathering.
  void become(State next);

  /// Returns the unit's description for plans.
  UnitShape shape() const;
  std::int64_t gathered_bytes() const;

  /// Sets the keeper that brings this unit's values; null if its parameters are always in memory. If the keeper
  /// `lends`, another unit may get the memory of this unit's parameters after use. Storages then return a pointer only
  /// while operators or Gathered guards pin the unit, since a program might keep the pointer too long.
  void watch(UnitKeeper* keeper, bool lends = false);
  UnitKeeper* keeper() const { return keeper_; }
  /// The log of operators that read this unit, if it is never gathered; null if there is no log.
  GatherLog* use_log = nullptr;
  /// Hash of the gathered values, under "check.values"; 0 if the values may change.
  std::uint64_t gathered_hash = 0;
  /// Makes the parameters' storages refuse access from now on: code that reads them gets an error with `message`.
  void poison(const std::string& message);

  /// It is called when this rank has read the unit's trainable parameters for the last time before they are updated
  /// (optimizer.in_backward). Code that reads them before `reopen` gets a c10::Error, wherever the values lie.
  void close();
  /// Makes the unit readable again after `close`.
  void reopen();
  bool is_closed() const { return is_closed_; }

  /// Returns the number of running operators and Gathered guards that use this unit.
  int pins() const { return pins_; }
  /// Keeps the unit's values in place until `unpin` was called as often as `pin`.
  void pin();
  void unpin();
  /// Returns whether a storage of this unit may now return a pointer to its values.
  bool lets_read(const FlatGroup& group) const {
    return group.full && (pins_ > hidden_pins_ || !lends_) && !(is_closed_ && group.trainable);
  }
  int guards = 0;  ///< number of open Gathered guards that have pinned the unit
  /// Returns whether a storage returns a pointer now only because an operator or an autograd function runs. Code that
  /// keeps this pointer for longer would read another unit's values.
  bool lends(const FlatGroup& group) const { return lends_ && guards == 0 && lets_read(group); }

  /// While a HiddenPins lives, the pins of operators that ran when it was made do not let code of the program read the
  /// unit. Such code may keep a pointer for longer than the operator's pin lasts. Guards and later operators let the
  /// code read.
  class HiddenPins {
   public:
    explicit HiddenPins(Unit& unit) : unit_(unit), before_(unit.hidden_pins_) {
      unit_.hide_pins(unit_.pins_ - unit_.guards);
    }
    ~HiddenPins() { unit_.hide_pins(before_); }
    HiddenPins(const HiddenPins&) = delete;
    HiddenPins& operator=(const HiddenPins&) = delete;

   private:
    Unit& unit_;
    const int before_;
  };

  int slot = -1;  ///< the residency's slot that holds the unit

 private:
  void hide_pins(int pins);

  int pins_ = 0;
  int hidden_pins_ = 0;  ///< number of pins that do not let code read the unit (HiddenPins)
  bool lends_ = false;
  State state_ = State::kReleased;
  bool is_closed_ = false;
  std::string closed_text_;  ///< error text of a closed unit; made when it is first needed
  UnitKeeper* keeper_ = nullptr;
};

/// Returns pointers to the units, in their order.
std::vector<Unit*> pointers_to(const std::vector<std::unique_ptr<Unit>>& units);

/// Calls `visit(group)` for every trainable group, in unit and group order.
template <class Visit>
void for_each_trainable(const std::vector<std::unique_ptr<Unit>>& units, const Visit& visit) {
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      if (group->trainable) visit(*group);
    }
  }
}

/// Calls `visit(state, place)` for each state that is kept for a parameter as a whole; `place` is an extent of the
/// buffer of tensor states.
template <class Visit>
void for_each_tensor_state(const FlatGroup& group, std::size_t parameter, const Visit& visit) {
  const TensorStates& states = group.tensor_states;
  if (states.empty()) return;
  for (std::size_t i = states.first[parameter]; i < states.first[parameter + 1]; ++i) {
    visit(group.of_tensors.shapes[i], states.layout.extent(i));
  }
}

/// Calls `visit(group, i)` for every parameter of a unit, in group and layout order.
template <class Visit>
void for_each_parameter(const Unit& unit, const Visit& visit) {
  for (const auto& group : unit.groups) {
    for (std::size_t i = 0; i < group->parameters.size(); ++i) visit(*group, i);
  }
}

/// Calls `visit` for the parameters of every unit, in order.
template <class Visit>
void for_each_parameter(const std::vector<std::unique_ptr<Unit>>& units, const Visit& visit) {
  for (const auto& unit : units) for_each_parameter(*unit, visit);
}

/// Returns the unit to which the storage of `tensor` belongs; null if there is none. REQUIRES: the unit's Engine lives.
/// The function only compares a pointer, without a look-up or a lock.
Unit* unit_of(const at::TensorBase& tensor);
Unit* unit_of(c10::StorageImpl& storage);
/// Returns the group of that unit whose storage `tensor` uses; null if there is none. REQUIRES: the unit's Engine
/// lives.
FlatGroup* flat_group_of(const at::TensorBase& tensor);
/// Returns whether the memory of `tensor` is lent to a running operator or autograd function (Unit::lends). REQUIRES:
/// the unit's Engine lives.
bool is_lent(const at::TensorBase& tensor);

/// Returns whether parameter `i` is still the view of its group's buffer that `rebase` made: at its offset, with its
/// sizes, strides and dtype.
bool is_in_place(const FlatGroup& group, std::size_t i);
/// Throws tessera::Error (64), naming the parameter, if is_in_place is false.
void expect_in_place(const FlatGroup& group, std::size_t i);

/// Moves `parameter` onto its group's storage at `offset` elements. The parameter keeps its TensorImpl and autograd
/// state. REQUIRES: the group is attached. Values are not copied.
void rebase(FlatParameter& parameter, const FlatGroup& group, std::int64_t offset);

}  // namespace tessera
