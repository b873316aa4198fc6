#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/init/init_tape.h"
#include "engine/init/known_draws.h"

namespace tessera {

/// Describes as text how a deferred tensor gets its values. The first line is the tensor itself; then there is one line
/// for each operator that it needs, with its arguments. Storages are numbered in the order in which they appear. So
/// equal texts mean equal values, if the generators' states and the values of real tensors are equal too. Ranks compare
/// this text, and messages show it. REQUIRES: the tensor is deferred.
std::string recipe_of(const at::Tensor& tensor);

/// Returns a hash of numbers that LibTorch draws and computes here. It is the same on two ranks whose LibTorch draws
/// the same numbers from the same state; the numbers also depend on the kind of processor.
std::uint64_t digest_of_arithmetic();

/// Makes any part of a deferred tensor without its other parts. Ranks that keep only a part of a parameter use it
/// (engine/parameters/first_values.h).
///
/// A part can be made by itself if every operator that makes the tensor's values treats each element by itself. Such an
/// operator creates a tensor (`empty`, `zeros`, `full`, ...), or fills one (with a constant, or by `uniform_` or
/// `normal_`, whose words are known). It may also be an element-wise operator with numbers or tensors of the same size
/// (`mul_`, `add`, `clamp_`, `to`, ...), if an element gets the same bits wherever the element lies. Values equal those
/// of `materialize` bit for bit.
///
/// One thread at a time uses a PieceMaker; `another` makes a PieceMaker for another thread.
class PieceMaker {
 public:
  /// Returns nothing if the tensor needs other operators, is not deferred, or is only a part of its storage.
  static std::optional<PieceMaker> of(const at::Tensor& tensor);

  /// Returns a copy that makes the same values, with generators and buffers of its own.
  PieceMaker another() const;

  std::int64_t numel() const { return numel_; }

  /// Makes elements [begin, begin + count), in the order of memory (that of the tensor's strides). Returns [count] of
  /// the tensor's dtype, valid until the next call. A call is fastest if it begins where the last call ended, and if
  /// `begin` is a multiple of 16.
  at::Tensor make(std::int64_t begin, std::int64_t count);

  /// Returns the generators' states before each draw, one after another, as bytes. Ranks that have the same recipe and
  /// the same states make the same values.
  std::vector<std::byte> states() const;
  /// Uses the states of another rank in place of its own states. REQUIRES: as many bytes as `states` returns.
  void set_states(const std::vector<std::byte>& states);

 private:
  /// One operator. A step whose `node` is null only makes the memory of a storage.
  struct Step {
    const InitTape::Node* node = nullptr;
    InitTape::Place made;  ///< the storage that the step creates or writes
    std::optional<KnownDraw> draw;
    at::Tensor state;  ///< the state of the generator before the draw
    std::optional<DrawPieces> pieces;
  };

  PieceMaker() = default;
  static std::optional<Step> step_of(const InitTape::Node& node, InitTape::Need need, std::int64_t numel);
  void run(Step& step, std::int64_t begin, std::int64_t count);
  at::Tensor& buffer(const InitTape::Place& place, std::int64_t count);

  std::shared_ptr<InitTape> tape_;
  InitTape::StorageId storage_ = 0;
  std::int64_t numel_ = 0;
  std::vector<Step> steps_;
  /// tensors of [count] elements that the running call made
  std::unordered_map<InitTape::StorageId, at::Tensor> made_;
};

}  // namespace tessera
