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

/// How a deferred tensor gets its values, as text: one line an operator that it needs, with its arguments; storages are
/// numbered in the order in which they appear, so that the same text stands for the same values up to the generators'
/// states and the values of real tensors. The first line is the tensor itself. For comparing ranks, and for messages.
std::string recipe_of(const at::Tensor& tensor);

/// The same on two ranks whose LibTorch draws the same numbers from the same state, which the kind of processor decides
/// too.
std::uint64_t digest_of_arithmetic();

/// Makes any piece of a deferred tensor without the rest of it: what a rank needs that keeps only its part.
///
/// That is possible where every operator on the tensor's way treats each element by itself: it is created (`empty`,
/// `zeros`, `full`, ...), filled (constants; `uniform_` and `normal_`, whose words are known), and goes through
/// element-wise operators with numbers or tensors of the same size (`mul_`, `add`, `clamp_`, `to`, ...), each of which
/// gives the same bits for an element wherever it stands. Values equal those of `materialize` bit for bit.
///
/// One thread at a time; `another` is for the next thread.
class PieceMaker {
 public:
  /// Empty where the tensor needs other operators, or is not deferred.
  static std::optional<PieceMaker> of(const at::Tensor& tensor);

  /// The same, with generators and buffers of its own.
  PieceMaker another() const;

  std::int64_t numel() const { return numel_; }

  /// Elements [begin, begin + count), in the order of memory (that of the tensor's strides): [count], of the tensor's
  /// dtype. Valid until the next call. Calls that go on where the last one ended are the cheapest, if they begin at a
  /// multiple of 16.
  at::Tensor make(std::int64_t begin, std::int64_t count);

  /// What the generators' states were before each draw, one after another, as bytes. Ranks that hold the same recipe and
  /// the same states make the same values.
  std::vector<std::byte> states() const;
  /// Takes another rank's. REQUIRES: as many bytes as `states` returns.
  void set_states(const std::vector<std::byte>& states);

 private:
  /// One operator. `node` null: only makes the storage.
  struct Step {
    const InitTape::Node* node = nullptr;
    InitTape::Place made;  ///< the one that it creates or writes
    std::optional<KnownDraw> draw;
    at::Tensor state;  ///< of the generator before the draw
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
  std::unordered_map<InitTape::StorageId, at::Tensor> made_;  ///< [count] each, in the call that runs
};

}  // namespace tessera
