#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "sharding/reducer.h"
#include "sharding/unit.h"

namespace tessera {

/// While it lives, the gradients of trainable parameters are the Engine's: what the Engine's own backward makes goes to the
/// reducer as soon as it is complete (autograd's post-accumulate hook), and what any other backward makes is dropped.
///
/// Either way `.grad` then holds a *stand-in*: a tensor of the gradient's shape without memory. Code that only asks
/// whether there is a gradient sees what it would see in plain LibTorch; code that reads or writes it (a torch::optim
/// step, clip_grad_norm_) gets a c10::Error that says what to do instead. A hook before accumulation takes the stand-in
/// away, so that a further backward does not add to it.
class GradientHooks {
 public:
  GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// While one lives, gradients count for these hooks' Engine. `factor`, if defined: what each is multiplied by first.
  class Taking {
   public:
    Taking(GradientHooks& hooks, at::Tensor factor);
    ~Taking();
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    GradientHooks& hooks_;
  };

  /// Throws tessera::Error (64), naming the first parameter whose gradient counts but whose `.grad` the program has since
  /// cleared or replaced: plain LibTorch would train with what the program left there.
  void expect_untouched() const;

  /// The step is over, or its microbatches are dropped: no gradient counts any more.
  void begin_step();

 private:
  struct Watched {
    FlatGroup* group = nullptr;
    std::size_t parameter = 0;
    unsigned before_hook = 0;
    bool counts = false;        ///< the Engine's backward has made a gradient since the last step
    bool is_lifted = false;     ///< the stand-in was taken away for a backward that has not reached accumulation yet
    at::Tensor taken, dropped;  ///< stand-ins, made when they are first needed

    const FlatParameter& flat() const { return group->parameters[parameter]; }
    bool is_stand_in(const at::Tensor& gradient) const {
      return gradient.defined() && (gradient.is_same(taken) || gradient.is_same(dropped));
    }
  };
  struct AfterAccumulation;

  void lift(Watched& watched);
  void receive(Watched& watched);
  void warn_of_foreign_backward(const Watched& watched);

  Reducer& reducer_;
  std::vector<Watched> watched_;  ///< [trainable parameter]; stays where it is
  bool taking_ = false;
  at::Tensor factor_;
  bool warned_ = false;
};

}  // namespace tessera
