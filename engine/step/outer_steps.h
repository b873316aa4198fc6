#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/step/outer_place.h"
#include "engine/step/step.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/compute_device.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes outer steps: replicas that train by themselves (SyncConfig) make an outer step together after every `every`
/// steps. The Engine owns an OuterSteps and calls it from the thread that trains, between inner steps. Each rank
/// exchanges data, over the replicate axis, with the ranks that have the same part of masters in the other replicas.
///
/// | type             | after an outer step all replicas have                                                |
/// |------------------|--------------------------------------------------------------------------------------|
/// | local_sgd        | the mean of their masters                                                            |
/// | diloco           | outer weights w, moved by SGD with Nesterov momentum along w - mean of their masters |
/// | streaming_diloco | as diloco, if `step` makes the outer step of all fragments at once                   |
///
/// Fragment f of F (streaming_diloco) has unit i if i modulo F is f. Its outer gradients are sent after step (f + 1) *
/// every / F, and then after each further `every` steps. If the group reduces in the background, computation continues
/// meanwhile. `delay` steps later each replica has mix * its own weights + (1 - mix) * outer weights. A fragment is
/// applied before the next fragment is sent.
///
/// Outer gradients go over a network in the forms that CompressionConfig names.
///
/// Each replica has its own optimizer states, and averages of the weights, until `meet`.
///
/// This class decides the order of an outer step's computations. An OuterPlace makes the computations where masters
/// lie, with the same bits on the CPU and on a GPU. On a GPU all computations are queued, and the host waits only in
/// `meet`. A sum that has begun runs at the same time as the steps that are queued after it. Waiting for the sum makes
/// the GPU's queue wait, but not the host. The hosts of GPUs make compressed sums. They wait for the contribution
/// before a sum begins, and for the sum before it is copied to the GPU.
class OuterSteps {
 public:
  /// `replica`: the axes over which training communicates. `whole`: the axes of the mesh; compressed sums of a GPU go
  /// over the hosts on its replicate axis (calls_on_host.h). `waits` measures how long a GPU's queue waits for
  /// collectives; it is null on the CPU. This object keeps references to all arguments except `whole` and `place`.
  /// REQUIRES: units have their first values, the same in all replicas.
  OuterSteps(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& replica,
             MeshAxes whole, std::unique_ptr<OuterPlace> place, QueueClock* waits);
  ~OuterSteps();

  /// Call it after inner step `step`. It makes the outer step, or the part of an outer step, that is due. If anything
  /// is due, the call is collective over the mesh.
  void after(std::int64_t step);
  /// Makes an outer step of all groups now, whatever the number of the last inner step is. A fragment under way is
  /// applied first.
  void step();
  /// Returns whether replicas may differ, because inner steps were made since the last outer step.
  bool is_due() const { return is_due_; }
  /// Makes all replicas equal, so that the state of one replica is the state of all. It makes an outer step if one is
  /// due. It averages the optimizer states of each parameter over the replicas that have updated this parameter. All
  /// replicas get the largest value of each count (steps, samples, a parameter's updates). It is collective over the
  /// mesh.
  void meet(Step& step);
  /// Call it after the same masters were written in all replicas. Outer weights become these masters, and a fragment
  /// that is under way is dropped. Momentum does not change.
  void adopt();
  void forget_momentum();

  /// Calls `visit` with the outer momentum of this rank's part of each parameter. The momentum of the elements `run` of
  /// the group's flat buffer lies at `momentum`, in memory of FlatGroup::device. Nothing is visited with
  /// local_sgd. If `visit` returns an error, the function stops and returns this error.
  using VisitMomentum =
      std::function<absl::Status(const FlatGroup& group, std::size_t parameter, Extent run, float* momentum)>;
  absl::Status for_each_momentum(const VisitMomentum& visit) const;

  /// These return the number of sums over replicas that have begun so far, and the number of bytes that this rank
  /// contributed to them. Bytes are counted as packed by the codec for a network.
  std::int64_t sums() const { return sums_; }
  std::int64_t sent_bytes() const { return sent_bytes_; }
  /// Returns the seconds spent so far in the collectives of outer steps, including waits for other replicas. On a GPU
  /// these are the seconds in which the host queued the collectives.
  double seconds() const { return seconds_; }

  std::int64_t memory_bytes() const;  ///< bytes of outer weights and momentum
  std::int64_t scratch_bytes() const { return flat_.bytes() + sent_.bytes(); }

 private:
  struct Outer {
    FlatGroup* group;
    float *weights, *momentum;  ///< [optimizer part]; null with local_sgd
    std::int64_t fragment = 0;
  };
  /// A group of the fragment under way.
  struct Sent {
    const Outer* outer;
    float* gradients;  ///< [optimizer part], in sent_: first this replica's outer gradients, then the sum over replicas
    Work work;
  };
  void step(const Outer& outer);
  void send(std::int64_t fragment, std::int64_t step);
  void apply_sent();
  void drop_sent();
  void write_gradients(const Outer& outer, const float* own, float* gradients);
  /// Returns a pass over this rank's part of a group. `values` [optimizer part] lie on the device of the OuterPlace.
  OuterRun run_of(const Outer& outer, OuterWork work, float* values) const;
  /// Reads a group's masters, and returns where this rank's part of them begins in `flat_`.
  float* read_own(const FlatGroup& group);
  /// Writes a group's new values. `flat_` has this rank's part of the values. The other parts are gathered if the ranks
  /// of a replica need them.
  void publish(FlatGroup& group);
  void wait_until_published();
  ReduceOptions options() const;
  Work sum_over_replicas(const std::string& label, float* values, std::int64_t numel, const ReduceOptions& options);
  std::vector<double> agree_on_counts(std::span<std::int64_t* const> counts);
  void average_states(std::span<const double> shares);
  void scale_parameters(const FlatGroup& group, Extent run, std::span<const double> factors, float* values);
  void mean_over_replicas(const std::string& label, float* values, std::int64_t numel,
                          const ReduceOptions& options = {});
  void divide_by_replicas(float* values, std::int64_t numel);
  void wait_for(Work& work, const std::string& label);
  float* flat() const { return reinterpret_cast<float*>(flat_.data()); }

  const MemoryPlan& plan_;
  const MeshAxes& replica_;
  const MeshAxes whole_;
  const std::shared_ptr<Collectives> replicate_;
  const SyncConfig config_;
  const std::unique_ptr<OuterPlace> place_;
  const OuterRule rule_;
  Arena weights_, momentum_;
  Arena flat_;  ///< whole masters of the largest group
  Arena sent_;  ///< this rank's part of the largest fragment, with streaming_diloco
  std::vector<Outer> groups_;
  bool is_due_ = false;
  std::int64_t sums_ = 0, sent_bytes_ = 0;
  std::int64_t arrives_ = 0;  ///< the step at which the fragment under way is applied
  QueueClock* const waits_;
  double seconds_ = 0;
  std::vector<Sent> under_way_;  ///< the last member, so that it is destroyed first: its work uses the other members
};

}  // namespace tessera
