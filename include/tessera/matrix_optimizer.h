#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule of the program's own that needs a whole matrix at a time. A program derives from it and gives the
/// object to the Engine:
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
/// The rule updates parameters of two dimensions, except those of Embedding modules; AdamW updates all others. Groups
/// can say otherwise (ParameterGroup::type). One rank computes each matrix, and the others send it their parts; all
/// ranks get about the same amount of work. Parameters, gradients and states are sharded, saved in checkpoints and
/// averaged (Strategy::ema) like those of the built-in rules, and results have the same bits under every strategy. All
/// tensors lie on the GPU if a GPU trains; what `update` does is queued, and the host waits once a step to learn which
/// matrices are used. With optimizer.in_backward the rule is called during Engine::backward, for the matrices of one
/// unit after the other, and a GPU's host waits once a unit.
class MatrixOptimizer {
 public:
  /// Largest number of states that a rule may keep of a matrix.
  static constexpr std::size_t kMostStates = 8;

  /// A state that the rule keeps of a matrix: fp32 numbers, zeros before the first update.
  struct State {
    std::string name;                 ///< name of the state in checkpoints
    std::vector<std::int64_t> sizes;  ///< shape of the state, such as {rows, 1}
  };

  /// One matrix to update. All tensors are fp32. The plan counts their memory, but not what `update` allocates beside
  /// them.
  struct Matrix {
    at::Tensor parameter;  ///< [rows, columns]: the fp32 master; its values after the call are the result
    /// [rows, columns]: mean over ranks and microbatches, clipped; the rule may overwrite it
    at::Tensor gradient;
    std::vector<at::Tensor> states;  ///< one tensor for each entry of `states(rows, columns)`, updated in place
    double lr = 0;                   ///< learning rate of this step and group
    double weight_decay = 0;         ///< the group's weight decay, or OptimizerConfig::weight_decay
    std::int64_t step = 1;           ///< how often this matrix was updated, this update included
  };

  virtual ~MatrixOptimizer() = default;
  /// Returns the states that the rule keeps of a matrix of this shape: at most kMostStates, names all different, none
  /// of them "ema" or "master". The answer must stay the same for the object's life.
  virtual std::vector<State> states(std::int64_t rows, std::int64_t columns) const = 0;
  /// Updates parameter and states. The result may depend on nothing but the fields of Matrix: ranks and strategy decide
  /// which rank makes the call, and a generator would draw other numbers on each rank. An exception that it throws
  /// leaves Engine::step, or Engine::backward with optimizer.in_backward, and ends the group on all ranks.
  virtual void update(Matrix& matrix) const = 0;
};

}  // namespace tessera
