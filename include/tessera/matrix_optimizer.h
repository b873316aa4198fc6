#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule of the program's own, for rules that need all of a matrix at a time:
///
///   struct RowScaledDescent final : tessera::MatrixOptimizer {
///     std::vector<State> states(std::int64_t rows, std::int64_t) const override { return {{"row_norm", {rows, 1}}}; }
///     void update(Matrix& m) const override {
///       m.states[0].mul_(0.9).add_(m.gradient.norm(2, 1, /*keepdim=*/true), 0.1);
///       m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.gradient / (m.states[0] + 1e-8), m.lr);
///     }
///   };
///   strategy.optimizer.type = tessera::OptimizerType::kOwnMatrix;  // "own_matrix" in the file
///   tessera::Engine engine(model, strategy, mesh, std::make_shared<RowScaledDescent>());
///
/// It updates parameters of two dimensions but those of Embedding modules; AdamW updates all others. Groups can say otherwise
/// (ParameterGroup::type). Each matrix is computed by one rank, to which the others send their parts; ranks are dealt about as much.
/// Parameters, gradients and states are sharded, saved in checkpoints and averaged (Strategy::ema) as those of the rules that are there,
/// and bits are those of every strategy. On a GPU all tensors are its own, what `update` does is queued, and the host waits once a step to
/// know which matrices are used.
class MatrixOptimizer {
 public:
  static constexpr std::size_t kMostStates = 8;

  /// A state that is kept of a matrix: fp32 numbers of these sizes, zeros before the first update.
  struct State {
    std::string name;  ///< for checkpoints
    std::vector<std::int64_t> sizes;
  };

  /// All tensors are fp32. Their memory is in the plan; what `update` makes beside them is not.
  struct Matrix {
    at::Tensor parameter;            ///< [rows, columns]: the fp32 master; what it is after the call counts
    at::Tensor gradient;             ///< likewise: mean over ranks and microbatches, clipped; may be overwritten
    std::vector<at::Tensor> states;  ///< as `states(rows, columns)`, updated in place
    double lr = 0;                   ///< of this step and group
    double weight_decay = 0;         ///< of this group, or OptimizerConfig's
    std::int64_t step = 1;           ///< how often this matrix was updated, with this update
  };

  virtual ~MatrixOptimizer() = default;
  /// What is kept of a matrix of this shape: at most kMostStates, each name once, "ema" and "master" not among them. The same for the
  /// object's life.
  virtual std::vector<State> states(std::int64_t rows, std::int64_t columns) const = 0;
  /// Updates parameter and states. May depend on nothing else: which rank calls it depends on the ranks and on the strategy, and a
  /// generator would draw other numbers on each. What it throws leaves Engine::step, and ends the group.
  virtual void update(Matrix& matrix) const = 0;
};

}  // namespace tessera
