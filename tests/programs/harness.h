#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "tessera/engine.h"
#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {

/// Trains one module, either plainly with LibTorch or with an Engine on each rank. A program is written once and runs
/// in both ways.
class Trainer {
 public:
  using Action = std::function<void()>;
  virtual ~Trainer() = default;

  virtual void backward(const at::Tensor& loss, const MicrobatchInfo& info = {}) = 0;
  /// Runs backward of a loss that also gives gradients to the modules of `others`.
  virtual void backward_with(const at::Tensor& loss, const std::vector<Trainer*>& others) = 0;
  /// Updates the parameters, records the step's loss in the scene, and clears the gradients.
  virtual void step() = 0;
  virtual void zero_grad() = 0;
  /// Runs `action` in a place where parameters may be read through pointers, or written.
  virtual void read(const Action& action) = 0;
  virtual void write(const Action& action) = 0;
  /// Makes a new optimizer, or destroys the Engine and then makes a new Engine over the same module. `adjust` changes
  /// the strategy of the new Engine.
  virtual void renew(const Adjust& adjust) = 0;
  /// Returns null if no Engine trains the module.
  virtual Engine* engine() { return nullptr; }
};

/// The error that a refused call must end with.
struct Refusal {
  std::vector<std::string> texts;                   ///< the message must contain all of these texts
  std::optional<ExitCode> code = ExitCode::kUsage;  ///< if this is empty, any c10::Error is right
};

/// The place where a program runs. The program runs once in this thread on the global batch, or on each rank on the
/// rank's rows of the batch. Both kinds of run must record the same values.
class Scene {
 public:
  /// Makes a plain scene, without an Engine.
  explicit Scene(const Strategy& strategy) : strategy_(strategy) {}
  Scene(const Strategy& strategy, const Mesh& mesh) : strategy_(strategy), mesh_(&mesh) {}

  bool is_plain() const { return mesh_ == nullptr; }
  const Mesh& mesh() const { return *mesh_; }
  int rank() const { return mesh_ ? mesh_->rank() : 0; }
  const Strategy& strategy() const { return strategy_; }
  /// Returns whether parameters have no memory while no code uses them.
  bool is_sharded() const;
  /// Returns whether all ranks together hold one copy of the parameters.
  bool shares_parameters() const;

  /// Returns this rank's rows of microbatch `index` of a global batch that is divided into `count` microbatches.
  at::Tensor rows(const at::Tensor& batch, std::int64_t index = 0, std::int64_t count = 1) const;
  std::unique_ptr<Trainer> trainer(std::shared_ptr<torch::nn::Module> module, const Adjust& adjust = nullptr);
  template <class Module>
  std::unique_ptr<Trainer> trainer(const torch::nn::ModuleHolder<Module>& holder, const Adjust& adjust = nullptr) {
    return trainer(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), adjust);
  }

  void note(double number) { numbers.push_back(number); }
  void note(Trainer& trainer, const torch::nn::Module& module);
  /// Checks that `call` throws on this rank: a tessera::Error with the code, or an operator's exception. If an operator
  /// throws, the group has ended with this code before. A plain scene does not run the call.
  void refused(const Trainer::Action& call, const Refusal& wanted) const;

  std::vector<double> numbers;
  Values values;

 private:
  Strategy strategy_;
  const Mesh* mesh_ = nullptr;
};

using Program = std::function<void(Scene&)>;

/// One combination of ranks, sharing and strategy. for_each_cell chooses the combinations on which programs run.
struct Cell {
  int ranks;
  Placed placed;
  std::string name() const { return name_of(placed) + " on " + std::to_string(ranks) + " ranks"; }
};
/// Calls `body` for a pairwise sample of 15 cells. Long tests call it for all 30 cells: {1, 2, 3} ranks x {shared,
/// private} x {FULL_SHARD with parameters on disk, FULL_SHARD, SHARD_GRAD_OP, SHARD_GRADIENTS, NO_SHARD}.
void for_each_cell(const std::function<void(const Cell&)>& body);

/// Options for running a program on the cells, and the allowed difference between its results and those of the plain
/// run.
struct ProgramOptions {
  Adjust adjust = nullptr;
  DType dtype = DType::kF32;
  double tolerance = 1e-5;  ///< the largest allowed |a - b| / (|b| + 1) of parameters
  double loss_tolerance = 1e-5;
  double timeout_s = 60;
};

/// Runs `program` plainly and on every cell, and compares the values that it recorded.
void expect_like_plain(const Program& program, const ProgramOptions& options = {});
/// Runs `program` on every cell. There is no plain run, since the program ends in a refusal.
void on_matrix(const Program& program, const ProgramOptions& options = {});
/// Does on one cell what on_matrix does on all cells.
void on_cell(const Cell& cell, const Program& program, const ProgramOptions& options = {});

}  // namespace tessera::testing
