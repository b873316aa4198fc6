#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {

class InitTape;

/// While it lives, on this thread: operators that make tensors make *meta* tensors (shapes without memory), and every
/// operator on them is written on a tape instead of being run. `materialize` plays the tape back.
///
/// The generator moves on as it would in eager construction (without drawing, where it is known how much an operator
/// draws); its state before each random operator is kept on the tape. So the values, and whatever is drawn afterwards,
/// are those of eager construction bit for bit, in whatever order tensors are materialised later.
///
/// An operator that needs a value (`item()`, `equal`, ...) computes the tensors it reads there and then. Code that
/// takes `data_ptr()` of a deferred tensor gets a c10::Error that says so.
class DeferredInitScope {
 public:
  enum class Content {
    kValues,
    kShapesOnly,  ///< see `shapes_only`
  };
  explicit DeferredInitScope(Content content = Content::kValues);
  ~DeferredInitScope();
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;

 private:
  std::shared_ptr<InitTape> previous_;
};

/// Runs `make` (any code that constructs modules) without allocating what it constructs:
///
///   auto model = tessera::deferred_init([] { return GPT(config); });
///
/// Give the result to an Engine, which materialises it unit by unit, or to `materialize`.
template <class Make>
auto deferred_init(Make&& make) {
  DeferredInitScope scope;
  return std::forward<Make>(make)();
}

/// As deferred_init, but for shapes alone: random operators leave the generator where it is, and the result can never be
/// materialised. Takes no longer for a large model than for a small one of as many layers. For `plan_memory`:
///
///   auto model = tessera::shapes_only([&] { return GPT(config); });
///   std::cout << tessera::plan_memory(*model, strategy, topology).table;
///
/// To materialise it, to give it to an Engine, or to read a value in `make` (`item()`) is a c10::Error that says so. Inside
/// an outer deferred_init, that one's rules hold.
template <class Make>
auto shapes_only(Make&& make) {
  DeferredInitScope scope(DeferredInitScope::Content::kShapesOnly);
  return std::forward<Make>(make)();
}

/// True if `tensor` was made under deferred_init and has no memory yet.
bool is_deferred(const at::Tensor& tensor);

/// Real CPU tensors with the values that eager construction would have given `tensors`, in the same order; tensors that
/// share a storage share one here as well. Memory needed: the tensors and what their values are computed from. The
/// deferred tensors stay as they are. Not deferred ones are returned as they are.
std::vector<at::Tensor> materialize(const std::vector<at::Tensor>& tensors);

/// Turns every parameter and buffer of `module` into a real tensor, in place: each keeps its TensorImpl.
void materialize_module(torch::nn::Module& module);

}  // namespace tessera
