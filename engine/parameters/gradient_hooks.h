#pragma once

// See docs/glossary.md: stand-in.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "runtime/torch/autograd_node.h"
#include "sharding/reduce/reducer.h"
#include "sharding/unit.h"

namespace torch::autograd {
struct FunctionPreHook;
struct PostAccumulateGradHook;
}  // namespace torch::autograd

namespace tessera {

/// Takes the gradients of trainable parameters for the Engine while this object lives; the Engine owns it. A gradient
/// that the Engine's own backward makes goes to the reducer as soon as it is complete (autograd's post-accumulate
/// hook). A gradient that any other backward makes is dropped. Hooks run on autograd's threads; the Engine makes all
/// other calls.
///
/// `.grad` then holds a *stand-in*: a tensor of the gradient's shape without memory. Code that only asks whether there
/// is a gradient gets the same answer as in plain LibTorch. Code that reads or writes the stand-in (a torch::optim
/// step, clip_grad_norm_) gets a c10::Error that says what to do instead. A hook before accumulation takes the stand-in
/// away, so that a further backward does not add to it.
///
/// Hooks of the program keep their meaning. A tensor's hooks change its gradient before it is accumulated. A tensor has
/// one post-accumulate hook; the hook of the program runs before the Engine's hook and sees the gradient of this rank
/// alone.
class GradientHooks {
 public:
  GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Lives while the Engine's backward runs; gradients then go to the reducer. If `factor` is defined, each gradient is
  /// first multiplied by it. If `counts` is false, each gradient is replaced by zeros, and no parameter counts as used.
  class Taking {
   public:
    Taking(GradientHooks& hooks, at::Tensor factor, bool counts);
    ~Taking();
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    GradientHooks& hooks_;
  };

  /// Throws tessera::Error (64) if the program has cleared or replaced the `.grad` of a parameter that has a gradient
  /// of this step. Plain LibTorch would then train with the gradient that the program left. The error names the first
  /// such parameter.
  void expect_untouched() const;

  /// It is called before a backward. It moves hooks to the nodes that now accumulate the parameters' gradients. Throws
  /// tessera::Error (64), which names the first parameter whose post-accumulate hook the program has replaced.
  void follow();

  /// It is called when a step has ended, or when its microbatches are dropped. It forgets the gradients of the step.
  void begin_step();

 private:
  struct BeforeAccumulation;
  struct AfterAccumulation;
  struct Watched {
    FlatGroup* group = nullptr;
    std::size_t parameter = 0;
    NodePtr accumulator;  ///< held here, because the tensor itself holds it only weakly
    const torch::autograd::FunctionPreHook* before = nullptr;
    const torch::autograd::PostAccumulateGradHook* after = nullptr;
    bool counts = false;        ///< whether the Engine's backward has made a gradient since the last step
    bool is_lifted = false;     ///< whether the stand-in was taken away for a backward that has not yet accumulated the
                                ///< gradient
    at::Tensor taken, dropped;  ///< stand-ins, made when they are first needed

    const FlatParameter& flat() const { return group->parameters[parameter]; }
    bool is_stand_in(const at::Tensor& gradient) const {
      return gradient.defined() && (gradient.is_same(taken) || gradient.is_same(dropped));
    }
  };

  void lift(Watched& watched);
  void receive(Watched& watched);
  void hook_before(Watched& watched, NodePtr accumulator);
  static void unhook_before(Watched& watched);
  [[noreturn]] static void throw_replaced_hook(const Watched& watched);
  [[noreturn]] static void throw_taken_away(const Watched& watched);
  void warn_of_foreign_backward(const Watched& watched);

  Reducer& reducer_;
  std::vector<Watched> watched_;  ///< [trainable parameter]; never reallocated, since hooks refer to its elements
  bool taking_ = false;
  at::Tensor factor_;
  bool counts_ = true;  ///< `counts` of the present Taking
  bool warned_ = false;
};

}  // namespace tessera
