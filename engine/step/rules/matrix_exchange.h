#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <span>
#include <vector>

#include "engine/memory/state_views.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/rules/matrix_rule.h"
#include "optim/device_kernels.h"
#include "optim/master_assigner.h"
#include "runtime/comm/collectives.h"
#include "sharding/compute_device.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Calls the function with views that together are this rank's whole optimizer part of a group, in the order of
/// elements. The views have masters.
using VisitMasters = c10::function_ref<void(const FlatGroup&, c10::function_ref<void(const StateView&)>)>;

/// Sends the pieces of matrices, which lie in the memory of all ranks, to the owners of the matrices, and sends the
/// owners' results back. Results are written over the gradients and the groups' tensor states. MatrixUpdate owns and
/// calls it.
class MatrixExchange {
 public:
  /// `masters`: reads the masters that go to owners; null under muon. `device`: the device on which
  /// TrainingMemory::matrices lie. `kernels`: the kernels of a GPU, which read masters there; null on the CPU.
  MatrixExchange(const StepContext& context, const MasterAssigner* masters, ComputeDevice device,
                 DeviceKernels* kernels);

  /// Calls `compute` for the matrices of this rank. It is collective. On a GPU, where work is queued, the host waits
  /// only in `visit_masters`. `visit_masters` is not called under muon. Throws tessera::Error.
  void run(const MatrixBatch& batch, VisitMasters visit_masters,
           c10::function_ref<void(const DealtMatrix&, const WholeMatrix&)> compute);

  /// Returns the seconds spent in exchanges so far, including waits for slower ranks.
  double seconds() const { return seconds_; }

 private:
  /// The messages from or to all ranks. Each has `numel` elements.
  class Messages {
   public:
    Messages(float* begin, std::int64_t numel, std::vector<std::int64_t>& used)
        : begin_(begin), numel_(numel), used_(used) {}
    /// Returns the next `numel` elements of the message from or to `rank`.
    float* next(int rank, std::int64_t numel);

   private:
    float* const begin_;
    const std::int64_t numel_;
    std::vector<std::int64_t>& used_;
  };

  /// A rank's part of a matrix: in the group's flat buffer, and in its tensor states.
  struct Held {
    Extent piece, states;
  };

  Held collected_from(const DealtMatrix& matrix, int rank) const;
  Held returned_to(const DealtMatrix& matrix, int rank) const;
  /// These functions read this rank's part of a matrix from the places where this rank holds it, and write it there.
  void read_own(const DealtMatrix& matrix, Held own, float* gradient, float* states) const;
  void write_own(const DealtMatrix& matrix, Held own, const float* result, const float* states) const;
  void collect(const MatrixBatch& batch, VisitMasters visit_masters);
  void collect_masters(std::span<const DealtMatrix> of_group, std::span<float* const> places,
                       VisitMasters visit_masters) const;
  WholeMatrix join(const DealtMatrix& matrix, Messages& from, const float*& own_masters);
  void cut(const DealtMatrix& matrix, const WholeMatrix& whole, Messages& to) const;
  void take_back(const MatrixBatch& batch);
  void read_masters(const FlatGroup& group, const StateView& view, Extent piece, float* to) const;
  void read_by_kernel(DeviceRun run, float* to) const;
  FlatGroup& group_of(const DealtMatrix& matrix) const { return *units_[matrix.unit]->groups[matrix.group]; }
  void exchange(const char* label, std::int64_t numel_per_rank);
  void copy(const float* from, std::int64_t numel, float* to) const;

  const MatrixDeal& deal_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const MasterAssigner* const masters_;
  const std::shared_ptr<Collectives> world_;
  const ComputeDevice device_;
  DeviceKernels* const kernels_;
  float* const sent_;
  float* const received_;
  const std::span<float> work_;
  const std::span<float> own_masters_;        ///< masters of a batch that are not sent; empty if `join` reads them
  std::vector<float*> places_;                ///< [matrix of the batch]: address for this rank's masters
  std::vector<std::int64_t> read_, written_;  ///< [rank]: number of elements used of the message from the rank, and of
                                              ///< the message to it
  double seconds_ = 0;
};

}  // namespace tessera
