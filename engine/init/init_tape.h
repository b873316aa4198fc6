#pragma once

// See docs/glossary.md: tape.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tessera {

/// The operators that gave deferred tensors their values, in the order of their calls. A DeferredInitScope makes it and
/// records on its own thread; `materialize` and PieceMaker read it later.
///
/// Values belong to storages, which have numbers; a tensor is a place in a storage. So views need no entry, and replay
/// rebuilds every argument as a view of a real storage.
///
/// Lifetime: the context of each deferred storage's (null) data pointer holds the tape. The tape refers to these
/// storages only by their numbers, so it is freed with the last deferred tensor.
class InitTape : public std::enable_shared_from_this<InitTape> {
 public:
  using StorageId = std::uint64_t;
  using Storages = std::unordered_map<StorageId, c10::Storage>;

  /// The place of a tensor in a storage. `strides` and `offset` are numbers of elements.
  struct Place {
    StorageId storage = 0;
    std::size_t storage_bytes = 0;
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset = 0;
    bool whole() const;       ///< whether the tensor is all of its storage
    bool contiguous() const;  ///< whether the tensor is its whole storage, with its elements in order
    /// Returns the number of elements of `dtype` for which the storage has memory.
    std::int64_t storage_numel() const { return static_cast<std::int64_t>(storage_bytes / c10::elementSize(dtype)); }
  };

  /// A deferred tensor among a node's arguments: argument number `argument` or, if that is a list, element number
  /// `element` of it.
  struct Patch {
    std::size_t argument = 0;
    std::ptrdiff_t element = -1;
    Place place;
  };
  /// One operator, with its arguments.
  struct Node {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< the arguments as given (original device); an undefined tensor stands for
                                         ///< each Patch
    std::vector<Patch> patches;
    std::vector<std::pair<std::size_t, Place>> creates;  ///< output number and place of each storage that the operator
                                                         ///< creates
    std::vector<StorageId> writes;                       ///< earlier storages that the operator changes
    /// whether the operator writes a whole storage without reading it
    bool overwrites = false;
    at::Generator generator;     ///< undefined for operators that draw no random numbers
    at::Tensor generator_state;  ///< the generator's state before the operator ran
    /// Returns the argument with this name, or null.
    const c10::IValue* argument(const char* name) const;
  };
  /// The need of other nodes, or of the caller, for a node: only memory for its storage, or its values.
  enum class Need : char { kStorageOnly, kYes };
  /// The nodes on which storages depend. Keys are the numbers of nodes, in the order of the tape.
  using Needs = std::map<std::size_t, Need>;

  enum class Content {
    kValues,      ///< generators advance, and everything can be replayed
    kShapesOnly,  ///< generators do not advance, nothing is recorded, and nothing can be replayed
  };
  explicit InitTape(Content content) : content_(content) {}

  /// Runs `op` on the arguments at the end of `stack` for its shapes only, records it, and leaves its outputs on the
  /// stack. The dispatcher's fallback calls it, with DeferredInit excluded. Throws c10::Error where a tensor belongs to
  /// another tape, or the operator writes a deferred tensor's values into a real one.
  void record(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  /// Makes real storages for `wanted`: replays the nodes that they depend on and nothing else, on several threads where
  /// that is possible. This function and needed_for throw c10::Error if the tape has only shapes.
  Storages replay(const std::unordered_set<StorageId>& wanted) const;

  /// Finds the nodes that `wanted` depend on. It goes back from the last node, and looks only at nodes that create or
  /// write storages that it needs.
  Needs needed_for(std::unordered_set<StorageId> wanted) const;
  const Node& node(std::size_t number) const { return nodes_[number]; }

 private:
  struct Part {
    std::vector<std::size_t> nodes;
    std::size_t bytes = 0;  ///< number of bytes of the storages that these nodes create
  };

  Node describe(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;
  bool run_for_shapes(const Node& node, torch::jit::Stack* stack) const;
  void run_with_values(const Node& node, torch::jit::Stack* stack) const;
  void note_outputs(Node& node, const torch::jit::Stack& stack);
  void draw(Node& node) const;
  void append(Node node);
  static bool shares_generator(const Node& node);
  std::vector<Part> parts_of(const Needs& needs) const;
  bool may_run_beside_others(const Part& part, const Needs& needs) const;
  Storages replay(const Part& part, const Needs& needs) const;
  void play(const Node& node, Storages& storages, const at::Generator& generator) const;
  void check_has_values() const;

  const Content content_;
  std::vector<Node> nodes_;
  std::unordered_map<StorageId, std::vector<std::size_t>>
      touching_;  ///< nodes that create or write a storage, in order
  StorageId next_storage_ = 1;
};

/// Returns the tape that made `tensor`, or null if it is not deferred.
std::shared_ptr<InitTape> tape_of(const at::Tensor& tensor);
/// Returns the place of `tensor` on its tape. REQUIRES: it is deferred.
InitTape::Place place_of(const at::Tensor& tensor);

/// Calls `visit(argument index, element or -1, tensor)` for every defined tensor in `arguments`.
void for_each_tensor(c10::ArrayRef<c10::IValue> arguments,
                     const std::function<void(std::size_t, std::ptrdiff_t, const at::Tensor&)>& visit);
/// Puts `tensor` at the given place of `arguments`. REQUIRES: the caller owns the lists (copy_with_own_lists).
void put(std::vector<c10::IValue>& arguments, std::size_t argument, std::ptrdiff_t element, at::Tensor tensor);
/// Copies `arguments` and the lists of tensors in them, which IValues otherwise share.
std::vector<c10::IValue> copy_with_own_lists(const std::vector<c10::IValue>& arguments);

/// Returns a real tensor at `place` of the real storage `storage`.
at::Tensor view_on(const c10::Storage& storage, const InitTape::Place& place);

}  // namespace tessera
