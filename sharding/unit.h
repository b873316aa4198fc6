#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sharding/layout/plan/memory_plan.h"
#include "sharding/layout/plan/record_layout.h"

namespace tessera {

class GatherLog;
class StateRecords;
class Unit;
class UnitKeeper;

/// A parameter of the user's module and where it lives now.
struct FlatParameter {
  static constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);

  at::Tensor tensor;                         ///< the user's own; keeps its TensorImpl for good
  std::string name;                          ///< "layers.3.attention.weight": the first name it was found under
  std::vector<std::string> aliases;          ///< further names of a tied parameter
  std::vector<std::int64_t> sizes, strides;  ///< strides as the module made them, if dense
  std::int64_t numel = 0;
  std::uint64_t hash = 0;        ///< of this rank's part, likewise; 0: not looked at
  std::uint32_t version = 0;     ///< of `tensor`, when it last was as the Engine left it
  std::size_t group = kNoGroup;  ///< among OptimizerConfig::groups
  bool is_embedding = false;     ///< some module of a class Embedding or EmbeddingBag has it
  std::int64_t number = 0;  ///< in order of registration, of all the module's parameters; the same whatever units are
};

/// A state that an optimizer keeps of a whole tensor.
struct TensorState {
  std::string name;
  std::vector<std::int64_t> sizes;
};

/// Parameters of one unit with one dtype that all train or are all frozen, and are all updated in the same way: one flat buffer.
///
///   full     [numel]              dtype   gathered; the parameters are views of it. Null while released
///   shard    [parameter_part]     dtype   this rank's part (inside `full` where that is permanent)
///   master   [optimizer_part]     fp32    what the optimizer updates; null where dtype is fp32, since `shard` is that, or
///                                         split into `shard` and `master_low` where master_kind says so
///   state    [optimizer_part]     fp32, bf16 or 8 bits with scales    what the optimizer keeps
///   tensor_state [tensor_state_part]  fp32    states of whole tensors, of shapes of their own
///   gradient [gradient_part]      fp32    sums over ranks and microbatches
///
/// Of shard, master and state, a part may lie below memory (`parameter_chunks`, `records`); then the pointers are to the
/// first elements, which are in memory. Of tensor_state all does or nothing. `engine/memory/state_views.h` reaches both.
///
/// All parts are extents of the same layout. Memory belongs to the engine's arenas.
struct FlatGroup {
  Unit* unit = nullptr;
  std::size_t index = 0;  ///< among the unit's groups
  Layout layout;
  DType dtype = DType::kF32;
  bool trainable = true;
  std::vector<MatrixShape> matrices;  ///< GroupShape::matrices: of each parameter, as its elements lie in memory
  std::vector<MatrixShape> factored;  ///< GroupShape::factored
  std::vector<FlatParameter> parameters;
  c10::intrusive_ptr<c10::StorageImpl> storage;
  c10::Device device = c10::Device(c10::kCPU);  ///< of all the memory below

  Extent parameter_part, gradient_part, optimizer_part;
  std::byte* full = nullptr;
  std::byte* shard = nullptr;
  MasterKind master_kind = MasterKind::kF32;
  float* master = nullptr;             ///< kF32
  std::int16_t* master_low = nullptr;  ///< kSplitBF16 (optim/arithmetic/rounding.h)
  struct State {
    std::byte* data = nullptr;
    float* scales = nullptr;  ///< of 8-bit states
  };
  std::array<State, kMostStates> state{};  ///< as Optimizer::states
  RecordLayout records;                    ///< of masters and states that lie below memory
  std::int64_t first_record = 0;           ///< number of its first record, among all groups'
  std::shared_ptr<StateRecords> below;     ///< holds the records; null where all is in memory
  Chunks parameter_chunks;                 ///< of `shard`
  std::int64_t first_parameter_record = 0;
  std::shared_ptr<StateRecords> parameters_below;  ///< likewise
  float* gradient = nullptr;
  TensorStates tensor_states;                    ///< GroupShape::tensor_states
  std::vector<TensorState> tensor_state_shapes;  ///< of each of their layout
  Extent tensor_state_part;                      ///< of their buffer
  float* tensor_state = nullptr;                 ///< null while it lies below memory
  std::int64_t tensor_state_record = -1;         ///< all of this rank's part; -1: in memory
  std::shared_ptr<StateRecords> tensor_states_below;

  /// Its parts and memory only: nothing that ties it to the module or to a unit.
  FlatGroup without_module() const;

  /// `element` of the tensor states, which lies in this rank's part.
  float* tensor_state_at(std::int64_t element) const { return tensor_state + (element - tensor_state_part.offset); }

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t gathered_bytes() const { return layout.numel() * element_bytes(); }
  GroupShape shape() const { return {dtype, trainable, layout, matrices, factored, tensor_states}; }

  /// Points the parameters at `memory` [layout.numel()], or at nothing. REQUIRES: `storage` is made (make_storage).
  void attach(std::byte* memory);
  /// Lets the parameters' storage give out its pointer, or refuses it with a c10::Error that says so, as Unit::lets_read has it.
  void set_access();
  void point_at(std::byte* memory);  ///< the storage alone
  /// The storage of all parameters of this group, without memory yet.
  void make_storage();
  /// The part of the flat buffer that the optimizer updates, in the parameters' dtype.
  std::byte* updated() const;
  std::string refusal;  ///< what whoever reads a parameter that is not gathered is told
};

/// The parameters that are gathered together.
///
/// | state     | full buffers | left by                                   |
/// |-----------|--------------|-------------------------------------------|
/// | kReleased | none         | Residency::gather -> kGathering           |
/// | kGathering| being filled | Residency::wait -> kGathered              |
/// | kGathered | valid        | Residency::release -> kReleased           |
///
/// Units whose parameters are replicated are kGathered for good and never meet a Residency. (A Publication may bring their updates.)
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
  /// The only way a state changes; throws on a step that the table above does not have.
  void become(State next);

  UnitShape shape() const;
  std::int64_t gathered_bytes() const;

  /// Who brings this unit's values. Null: nobody, its parameters are always there. With `lends`, their memory is another unit's after
  /// use: then a pointer to it is given out only while the unit is pinned, to operators and under Gathered guards, since nobody can know
  /// how long a program keeps one.
  void watch(UnitKeeper* keeper, bool lends = false);
  UnitKeeper* keeper() const { return keeper_; }
  /// Notes the operators that read this unit, where nobody gathers it.
  GatherLog* use_log = nullptr;
  /// Of the gathered values, under "check.values"; 0: they may change.
  std::uint64_t gathered_hash = 0;
  /// The parameters' storages refuse access with `message` from then on: what reads them throws that.
  void poison(const std::string& message);

  /// This rank has read the unit's trainable parameters for the last time before they are updated (optimizer.in_backward):
  /// whoever reads them until `reopen` gets a c10::Error that says so, wherever their values are.
  void close();
  void reopen();
  bool is_closed() const { return is_closed_; }

  /// Operators running on this unit, and Gathered guards.
  int pins() const { return pins_; }
  void pin();
  void unpin();
  /// Whether a storage of this unit may give out a pointer to its values now.
  bool lets_read(const FlatGroup& group) const {
    return group.full && (pins_ > 0 || !lends_) && !(is_closed_ && group.trainable);
  }

  int slot = -1;  ///< the residency's slot that holds it

 private:
  int pins_ = 0;
  bool lends_ = false;
  State state_ = State::kReleased;
  bool is_closed_ = false;
  std::string closed_text_;  ///< made when it is first needed
  UnitKeeper* keeper_ = nullptr;
};

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

/// Calls `visit(state, place)` for each state that is kept of a parameter as a whole; `place` is an extent of the tensor states' buffer.
template <class Visit>
void for_each_tensor_state(const FlatGroup& group, std::size_t parameter, const Visit& visit) {
  const TensorStates& states = group.tensor_states;
  if (states.empty()) return;
  for (std::size_t i = states.first[parameter]; i < states.first[parameter + 1]; ++i) {
    visit(group.tensor_state_shapes[i], states.layout.extent(i));
  }
}

/// Calls `visit(group, i)` for every parameter of a unit, in group and layout order.
template <class Visit>
void for_each_parameter(const Unit& unit, const Visit& visit) {
  for (const auto& group : unit.groups) {
    for (std::size_t i = 0; i < group->parameters.size(); ++i) visit(*group, i);
  }
}

/// And of every unit, in order.
template <class Visit>
void for_each_parameter(const std::vector<std::unique_ptr<Unit>>& units, const Visit& visit) {
  for (const auto& unit : units) for_each_parameter(*unit, visit);
}

/// The unit, of an Engine that lives, that `tensor`'s storage belongs to, or null. A pointer comparison: no look-up, no
/// lock.
Unit* unit_of(const at::TensorBase& tensor);
Unit* unit_of(c10::StorageImpl& storage);

/// Whether parameter `i` still lies in its group's buffer.
bool is_in_place(const FlatGroup& group, std::size_t i);
/// Throws tessera::Error (64), naming the parameter, if it does not.
void expect_in_place(const FlatGroup& group, std::size_t i);

/// Moves `parameter` onto its group's storage at `offset` elements. Keeps its TensorImpl and autograd state. The group
/// must be attached. Values are not copied.
void rebase(FlatParameter& parameter, const FlatGroup& group, std::int64_t offset);

}  // namespace tessera
