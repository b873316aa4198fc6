#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule of the program's own that looks at each element by itself. A program derives from it and gives the
/// object to the Engine:
///
///   struct SignDescent final : tessera::ElementwiseOptimizer {
///     std::vector<std::string> states() const override { return {"momentum"}; }
///     void update(Elements& e) const override {
///       e.states[0].mul_(0.9).add_(e.gradient, 0.1);
///       e.parameters.mul_(1 - e.lr * e.weight_decay).sub_(e.states[0].sign(), e.lr);
///     }
///   };
///   strategy.optimizer.type = tessera::OptimizerType::kOwn;  // "own" in the file
///   tessera::Engine engine(model, strategy, mesh, std::make_shared<SignDescent>());
///
/// Parameters, gradients and states are sharded, offloaded, saved in checkpoints and averaged (Strategy::ema) like
/// those of the built-in rules. The tensors lie on the GPU if a GPU trains, wherever its state lies; Engine::step waits
/// for the device once before it calls the rule. The rule is called unit by unit during Engine::backward with
/// optimizer.in_backward. A thread of LibTorch calls the rule in that case if a GPU trains, and waits for the device
/// once a unit. The rule gets CPU tensors with offload.step "cpu".
class ElementwiseOptimizer {
 public:
  /// Largest number of states that a rule may keep.
  static constexpr std::size_t kMostStates = 3;
  /// Largest number of elements of one call of `update`, on the CPU and on a GPU. A call needs memory beside the plan:
  /// twice that many elements in fp32, and whatever the rule allocates.
  static constexpr std::int64_t kMostElements = 32768, kMostElementsOnGpu = std::int64_t{1} << 22;

  /// A run of elements of one parameter or of several neighbours; it begins and ends anywhere in them. All tensors are
  /// fp32 of shape [n], with the same n, which is a multiple of 32. Padding elements do not belong to the program, and
  /// their results are not used.
  struct Elements {
    at::Tensor parameters;  ///< the fp32 masters; the values after the call are the result
    at::Tensor gradient;    ///< mean over ranks and microbatches, clipped; the rule may overwrite it
    /// one tensor for each name of `states()`; zeros before the first update, updated in place
    std::vector<at::Tensor> states;
    double lr = 0;            ///< learning rate of this step and group
    double weight_decay = 0;  ///< weight decay of this group, or that of OptimizerConfig
    std::int64_t step = 1;    ///< how often these elements were updated, this update included
  };

  virtual ~ElementwiseOptimizer() = default;
  /// Returns the names of the states, which checkpoints use: at most kMostStates, all different, none of them "ema".
  /// The answer must stay the same for the object's life.
  virtual std::vector<std::string> states() const = 0;
  /// Updates parameters and states. The result for an element may depend on nothing but its own numbers, lr,
  /// weight_decay and step, since ranks and strategy decide where a run begins. LibTorch's operators qualify, except
  /// those that look at several elements (sums, norms) or draw random numbers. An exception that it throws leaves
  /// Engine::step and ends the group on all ranks.
  virtual void update(Elements& elements) const = 0;
};

}  // namespace tessera
