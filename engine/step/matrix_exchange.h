#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes orthogonal what lies, in pieces, in all ranks' gradients of matrices: each matrix is computed by its owner.
class MatrixExchange {
 public:
  /// `memory`: of MemoryPlan::matrices().exchange_numel() twice and work_numel() once, fp32. `world`: of all ranks.
  MatrixExchange(const MatrixDeal& deal, const std::vector<std::unique_ptr<Unit>>& units, const Arena& memory,
                 std::int64_t steps, std::shared_ptr<Collectives> world);

  /// `factor_of(matrix)`: what the orthogonal matrix is multiplied by; 0: it is not wanted, and what comes back has no meaning. The
  /// same on all ranks. Collective. Throws tessera::Error.
  void run(const MatrixBatch& batch, c10::function_ref<float(const DealtMatrix&)> factor_of);

  /// Spent in exchanges so far, waiting for ranks that compute longer included.
  double seconds() const { return seconds_; }

 private:
  void collect(const MatrixBatch& batch);
  void compute(const DealtMatrix& matrix, const MatrixBatch& batch, float factor);
  void send_back(const MatrixBatch& batch);
  float* gradient(const DealtMatrix& matrix, Extent piece) const;
  void exchange(const char* label, std::int64_t numel_per_rank);

  const MatrixDeal& deal_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const std::int64_t steps_;
  const std::shared_ptr<Collectives> world_;
  float* const sent_;
  float* const received_;
  const std::span<float> work_;
  std::vector<std::int64_t> read_, written_;  ///< of the messages from and to each rank
  double seconds_ = 0;
};

}  // namespace tessera
