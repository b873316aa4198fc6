#pragma once

// See docs/glossary.md: dealt, unit.

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/step/agree/step_context.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/rules/matrix_exchange.h"
#include "engine/step/rules/matrix_rule.h"
#include "engine/step/rules/tensor_rule.h"
#include "optim/optimizer.h"
#include "sharding/carrier.h"

namespace tessera {

/// Updates of whole matrices, by Muon or by a TensorRule. The class Update makes the passes over single elements,
/// before and after the exchange of matrices.
class MatrixUpdate {
 public:
  /// `rule`: null under muon. `kernels`: the kernels of `device` if it is a GPU; else null.
  MatrixUpdate(const StepContext& context, std::shared_ptr<const TensorRule> rule, ComputeDevice device = {},
               DeviceKernels* kernels = nullptr);

  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options) { rule_.follow(options); }

  /// Announces the exchange of all units, or in backward the exchange of `unit`. The offloaded state that the exchange
  /// uses is then read ahead.
  void expect(std::optional<std::int32_t> unit);

  /// Returns the rule, for the passes over single elements before and after the exchange.
  const MatrixRule& rule() const { return rule_; }

  /// The inputs from which the numbers of a step are computed.
  struct OfStep {
    const LearningRates& learning_rates;
    const UpdateRates& rates;
    std::span<const std::int64_t> steps;  ///< [trainable parameter]: steps in which it took part, this one included
    std::span<const char> used;           ///< [trainable parameter]: whether it takes part in this step
  };
  /// Exchanges matrices of all ranks, batch by batch. In backward it exchanges only the matrices of `unit`. Results are
  /// written over the gradients. It is collective. `step` is the same on all ranks. Under muon it is null if the host
  /// does not know which parameters are used; then no matrix is left out. `visit_masters` is called for each group in
  /// order, except under muon. Throws tessera::Error, and the exceptions of a program's rule.
  void exchange(std::optional<std::int32_t> unit, const OfStep* step, VisitMasters visit_masters);

  /// Returns the seconds spent in exchanges so far.
  double seconds() const { return exchange_->seconds(); }
  /// Returns the bytes of states of whole tensors that were copied to the GPU so far.
  std::int64_t streamed_bytes() const { return states_ ? states_->uploaded_bytes() : 0; }

 private:
  std::span<const MatrixBatch> batches_of(std::optional<std::int32_t> unit) const;
  void exchange_batch(const MatrixBatch& batch, const OfStep* step, VisitMasters visit_masters);
  void compute(const DealtMatrix& matrix, const WholeMatrix& whole, const OfStep* step) const;
  std::size_t parameter_of(const DealtMatrix& matrix) const;
  std::vector<FlatGroup*> offloaded_in(const MatrixBatch& batch) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  const MatrixDeal& deal_;
  MatrixRule rule_;
  std::vector<std::size_t> parameters_;  ///< [dealt matrix]: index of the parameter among all trainable parameters
  std::optional<MatrixExchange> exchange_;
  Carrier* const states_;  ///< brings the offloaded states of tensors; null if none are offloaded
};

}  // namespace tessera
