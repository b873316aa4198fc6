#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

/// While it lives, the gradients of trainable parameters are the Engine's: what the Engine's own backward makes goes to the
/// reducer as soon as it is complete (autograd's post-accumulate hook), and what any other backward makes is dropped.
///
/// Either way `.grad` then holds a *stand-in*: a tensor of the gradient's shape without memory. Code that only asks
/// whether there is a gradient sees what it would see in plain LibTorch; code that reads or writes it (a torch::optim
/// step, clip_grad_norm_) gets a c10::Error that says what to do instead. A hook before accumulation takes the stand-in
/// away, so that a further backward does not add to it.
///
/// Hooks of the program keep their meaning: those of a tensor change its gradient before it is accumulated; a
/// post-accumulate hook, of which a tensor has one, runs before the Engine's and sees this rank's own gradient.
class GradientHooks {
 public:
  GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// While one lives, gradients are these hooks' Engine's. `factor`, if defined: what each is multiplied by first. `counts`: false: zeros
  /// take the place of each, and no parameter is used by it.
  class Taking {
   public:
    Taking(GradientHooks& hooks, at::Tensor factor, bool counts);
    ~Taking();
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    GradientHooks& hooks_;
  };

  /// Throws tessera::Error (64), naming the first parameter whose gradient counts but whose `.grad` the program has since
  /// cleared or replaced: plain LibTorch would train with what the program left there.
  void expect_untouched() const;

  /// Before a backward: follows parameters to the nodes that accumulate their gradients now. Throws tessera::Error (64), naming
  /// the first parameter whose post-accumulate hook the program has replaced.
  void follow();

  /// The step is over, or its microbatches are dropped: no gradient counts any more.
  void begin_step();

 private:
  struct BeforeAccumulation;
  struct AfterAccumulation;
  struct Watched {
    FlatGroup* group = nullptr;
    std::size_t parameter = 0;
    NodePtr accumulator;  ///< held, since a tensor holds it weakly
    const torch::autograd::FunctionPreHook* before = nullptr;
    const torch::autograd::PostAccumulateGradHook* after = nullptr;
    bool counts = false;        ///< the Engine's backward has made a gradient since the last step
    bool is_lifted = false;     ///< the stand-in was taken away for a backward that has not reached accumulation yet
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
  std::vector<Watched> watched_;  ///< [trainable parameter]; stays where it is
  bool taking_ = false;
  at::Tensor factor_;
  bool counts_ = true;  ///< what is taken
  bool warned_ = false;
};

}  // namespace tessera
