#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// An update rule, defined by the program, that needs a whole matrix at a time. A program derives a class from
/// MatrixOptimizer and gives the object to the Engine:
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
/// The rule updates parameters of two dimensions, except those of Embedding modules; AdamW updates all others. A group
/// can choose another rule for its parameters (ParameterGroup::type). One rank updates a whole matrix, and the other
/// ranks send it their parts. All ranks get about the same amount of work. Parameters, gradients and states are
/// sharded, saved in checkpoints and averaged (Strategy::ema) like those of the built-in rules, and results have the
/// same bits under every strategy. If a GPU trains, all tensors lie on the GPU and the operators of `update` are
/// queued. The host waits once in each step to find out which matrices are used. If optimizer.in_backward is set,
/// Engine::backward calls the rule, unit by unit, and the host of a GPU waits once for each unit.
class MatrixOptimizer {
 public:
  /// Largest number of states that a rule may keep for a matrix.
  static constexpr std::size_t kMostStates = 8;

  /// A state that the rule keeps for a matrix: fp32 numbers, which are zeros before the first update.
  struct State {
    std::string name;                 ///< name of the state in checkpoints
    std::vector<std::int64_t> sizes;  ///< shape of the state, such as {rows, 1}
  };

  /// One matrix to update. All tensors are fp32. The plan counts the memory of these tensors, but not the memory that
  /// `update` itself allocates.
  struct Matrix {
    at::Tensor parameter;  ///< [rows, columns]: the fp32 master; its values after the call are the result
    /// [rows, columns]: mean over ranks and microbatches, clipped; the rule may overwrite it
    at::Tensor gradient;
    std::vector<at::Tensor> states;  ///< one tensor for each entry of `states(rows, columns)`, updated in place
    double lr = 0;                   ///< learning rate of this step and group
    double weight_decay = 0;         ///< the group's weight decay, or OptimizerConfig::weight_decay
    std::int64_t step = 1;           ///< number of updates of this matrix, this update included
  };

  virtual ~MatrixOptimizer() = default;
  /// Returns the states that the rule keeps for a matrix of this shape. There are at most kMostStates states. All names
  /// are different, not empty, and without '|' and '.'. None of them is a name that checkpoints use themselves, such as
  /// "ema" or "master". The result must not change while the object lives.
  virtual std::vector<State> states(std::int64_t rows, std::int64_t columns) const = 0;
  /// Updates parameter and states. The result may depend only on the fields of Matrix, since the number of ranks and
  /// the strategy decide which rank makes the call. A generator would draw other numbers on each rank. An exception of
  /// the rule leaves Engine::step, or Engine::backward with optimizer.in_backward, and ends the communication of all
  /// ranks.
  virtual void update(Matrix& matrix) const = 0;
};

}  // namespace tessera
