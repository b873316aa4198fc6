#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule of the program's own, for rules that look at each element by itself:
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
/// Parameters, gradients and states are sharded, offloaded, saved in checkpoints and averaged (Strategy::ema) as those of the rules
/// that are there. On a GPU the tensors are its own, wherever its state lies, and Engine::step waits for the device once before it calls
/// the rule; with optimizer.in_backward the rule is called unit by unit from Engine::backward, on LibTorch's thread for that device, which
/// waits once a unit. With offload.step "cpu" the rule gets tensors of the host.
class ElementwiseOptimizer {
 public:
  static constexpr std::size_t kMostStates = 3;
  /// Elements that are updated with one call, at most, by the CPU and by a GPU. A call needs memory beside the plan: for so many elements
  /// twice in fp32, and for what the rule makes.
  static constexpr std::int64_t kMostElements = 32768, kMostElementsOnGpu = std::int64_t{1} << 22;

  /// A run of elements, of one parameter or of several neighbours, that begins and ends anywhere in them. All tensors have
  /// one dimension and as many elements [n], fp32. Their number is a multiple of 32: what fills up is not the program's, and what
  /// becomes of it has no meaning.
  struct Elements {
    at::Tensor parameters;           ///< the fp32 masters; what they are after the call counts
    at::Tensor gradient;             ///< mean over ranks and microbatches, clipped; may be overwritten
    std::vector<at::Tensor> states;  ///< as `states()`; zeros before the first update, updated in place
    double lr = 0;                   ///< of this step and group
    double weight_decay = 0;         ///< of this group, or OptimizerConfig's
    std::int64_t step = 1;           ///< how often these elements were updated, with this update
  };

  virtual ~ElementwiseOptimizer() = default;
  /// Names of the states, for checkpoints: at most kMostStates, each once, "ema" not among them. The same for the object's life.
  virtual std::vector<std::string> states() const = 0;
  /// Updates parameters and states. What becomes of an element may depend on nothing but its own numbers, lr, weight_decay and step: where
  /// a run begins depends on the ranks and on the strategy. Operators of LibTorch are such functions, but those that look at several
  /// elements (sums, norms) or draw random numbers. What it throws leaves Engine::step, and ends the group.
  virtual void update(Elements& elements) const = 0;
};

}  // namespace tessera
