#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule, defined by the program, that updates each element by itself. A program derives a class from
/// ElementwiseOptimizer and gives the object to the Engine:
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
/// those of the built-in rules. If a GPU trains, the tensors lie on the GPU, even if state is offloaded. Engine::step
/// waits for the device once before it calls the rule. With optimizer.in_backward the rule is called unit by unit
/// during Engine::backward. If a GPU trains, a thread of LibTorch then calls the rule, and waits for the device once
/// for each unit. The rule gets CPU tensors if offload.step is "cpu".
class ElementwiseOptimizer {
 public:
  /// Largest number of states that a rule may keep.
  static constexpr std::size_t kMostStates = 3;
  /// Largest number of elements of one call of `update`, on the CPU and on a GPU. A call needs memory that is not in
  /// the plan: twice that many elements in fp32, and the memory that the rule allocates.
  static constexpr std::int64_t kMostElements = 32768, kMostElementsOnGpu = std::int64_t{1} << 22;

  /// A run of elements of one parameter or of several neighbouring parameters. It may begin and end at any element. All
  /// tensors are fp32 of shape [n], with the same n, which is a multiple of 32. Padding elements do not belong to the
  /// program, and their results are not used.
  struct Elements {
    at::Tensor parameters;  ///< the fp32 masters; the values after the call are the result
    at::Tensor gradient;    ///< mean over ranks and microbatches, clipped; the rule may overwrite it
    /// one tensor for each name of `states()`; zeros before the first update, updated in place
    std::vector<at::Tensor> states;
    double lr = 0;            ///< learning rate of this step and group
    double weight_decay = 0;  ///< weight decay of this group, or else that of OptimizerConfig
    std::int64_t step = 1;    ///< number of updates of these elements, this update included
  };

  virtual ~ElementwiseOptimizer() = default;
  /// Returns the names of the states, which checkpoints use. There are at most kMostStates names. All names are
  /// different, not empty, and without '|' and '.'. None of them is a name that checkpoints use themselves, such as
  /// "ema" or "master". The result must not change while the object lives.
  virtual std::vector<std::string> states() const = 0;
  /// Updates parameters and states. The result for an element may depend only on its own numbers, lr, weight_decay and
  /// step, since ranks and strategy decide where a run begins. A rule may use LibTorch's operators, except those that
  /// combine several elements (sums, norms) or draw random numbers. An exception of the rule leaves Engine::step, and
  /// ends the communication of all ranks.
  virtual void update(Elements& elements) const = 0;
};

}  // namespace tessera
