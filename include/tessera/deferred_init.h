#pragma once

// See docs/glossary.md: tape, unit.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {

class InitTape;

/// A guard that defers construction on this thread. While it lives, operators that make tensors make *meta* tensors
/// (shapes without memory), and every operator on them is written on a tape instead of being run. `materialize` plays
/// the tape back. Guards nest.
///
/// The random generator advances as it would in eager construction: the numbers of large uniform and normal tensors are
/// skipped, and all other numbers are drawn. The tape keeps the generator's state before each random operator. The
/// values, and all numbers that are drawn afterwards, are therefore equal to those of eager construction bit for bit,
/// in whatever order tensors are materialised later.
///
/// An operator that needs a value (`item()`, `equal`, ...) causes the tensors that it reads to be computed immediately.
/// Code that calls `data_ptr()` of a deferred tensor gets a c10::Error.
class DeferredInitScope {
 public:
  /// The content of the tape.
  enum class Content {
    kValues,      ///< values, which `materialize` makes
    kShapesOnly,  ///< only shapes; see `shapes_only`
  };
  /// Begins to defer construction. The destructor ends the deferral, on the same thread.
  explicit DeferredInitScope(Content content = Content::kValues);
  ~DeferredInitScope();
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;

 private:
  std::shared_ptr<InitTape> previous_;
};

/// Runs `make` (any code that constructs modules) without allocating the tensors, and returns its result:
///
///   auto model = tessera::deferred_init([] { return GPT(config); });
///
/// Give the result to an Engine, which materialises it unit by unit, or to `materialize`.
template <class Make>
auto deferred_init(Make&& make) {
  DeferredInitScope scope;
  return std::forward<Make>(make)();
}

/// Runs `make` as deferred_init does, but records only shapes: random operators do not advance the generator, and the
/// result can never be materialised. The call takes no longer for a large model than for a small model with as many
/// layers. It is meant for `plan_memory`:
///
///   auto model = tessera::shapes_only([&] { return GPT(config); });
///   std::cout << tessera::plan_memory(*model, strategy, topology).table;
///
/// A c10::Error is thrown if the result is materialised or given to an Engine, or if `make` reads a value (`item()`).
/// If shapes_only is called inside a deferred_init, it uses the tape of the deferred_init, and values are recorded.
template <class Make>
auto shapes_only(Make&& make) {
  DeferredInitScope scope(DeferredInitScope::Content::kShapesOnly);
  return std::forward<Make>(make)();
}

/// Returns true if `tensor` was made under deferred_init and has no memory yet.
bool is_deferred(const at::Tensor& tensor);

/// Returns real CPU tensors with the values that eager construction would have given `tensors`, in the same order.
/// Tensors that share a storage also share a storage in the result. The call needs memory for the tensors, and for the
/// tensors from which their values are computed. The deferred tensors stay as they are; tensors that are not deferred
/// are returned unchanged. Throws c10::Error for tensors of shapes_only.
std::vector<at::Tensor> materialize(const std::vector<at::Tensor>& tensors);

/// Turns every parameter and buffer of `module` into a real tensor, in place: each tensor keeps its TensorImpl. Errors
/// are those of materialize.
void materialize_module(torch::nn::Module& module);

}  // namespace tessera
