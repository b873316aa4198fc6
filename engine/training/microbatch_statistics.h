#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/loop/recorded_norms.h"
#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "tessera/strategy.h"

namespace tessera {

/// Gives batch norms the running statistics that they would have on one rank with all microbatches
/// ("broadcast_buffers": "microbatch_order"). During a step, forwards do not write running_mean and running_var. They
/// write the change that a microbatch makes to these buffers (RecordedNorm). At the step's end ranks send each other
/// the changes, and every rank applies the changes of all microbatches in the order of the microbatches' numbers. The
/// result therefore does not depend on which rank computed a microbatch.
///
/// - A forward that is computed again for backward changes nothing.
/// - Changes of microbatches that do not count ("deal.backups", zero_grad) are dropped. A step that is skipped, because
///   of an overflow or a spike, still changes the statistics, as forwards of plain LibTorch do.
/// - The change of a microbatch has the buffers' dtype. Changes are applied in fp64, and the results are rounded to the
///   buffers' dtype at the end of a step.
///
/// Training owns a MicrobatchStatistics, and calls it from the thread that trains.
class MicrobatchStatistics {
 public:
  /// `group` has all ranks; it may be one rank. The object refers to `module`. REQUIRES: expect_running_statistics.
  MicrobatchStatistics(const torch::nn::Module& module, const MicrobatchOrder& order,
                       std::shared_ptr<Collectives> group);

  /// Returns the fp64 numbers that a rank sends for one microbatch: two for each batch norm of the module, and two for
  /// each of its channels. The result is 0 if the strategy does not set "microbatch_order".
  static std::int64_t numel_of(const torch::nn::Module& module, const Strategy& strategy);

  /// It is called when a backward begins. Forwards until `end_backward` are computed again.
  void begin_backward();
  /// It is called when a backward has ended.
  void end_backward();
  /// Notes that the microbatch of this rank's `round` has ended and counts. On the CPU, throws tessera::Error (64) if
  /// two microbatches, one after the other, wrote a norm's statistics by other operators than aten::batch_norm, as
  /// compiled code does. (A single such write is allowed, since a program may have loaded the statistics.)
  void end_microbatch(std::int64_t round);
  /// Drops the change of the microbatch under way, which does not count.
  void drop_microbatch();
  /// Drops the changes of the step's microbatches that have ended. A forward whose backward has not begun stays.
  void drop_step();
  /// Applies the changes of the step under way. `order` tells which rank computed each of its microbatches. The call is
  /// collective. Throws tessera::Error (64) if the program has given a norm other buffers.
  void apply(const MicrobatchOrder& order);
  /// Returns the seconds spent in collectives so far.
  double communication_seconds() const { return seconds_; }

 private:
  /// A norm, and the data by which unrecorded writes to its statistics are noticed.
  struct Kept {
    const torch::nn::Module* module;
    std::shared_ptr<RecordedNorm> norm;
    at::Tensor known_mean;  ///< copy of the running mean at the last check; undefined on a GPU
    int unseen = 0;         ///< number of latest microbatches that wrote the mean without a recorded forward
  };

  void look_for_writes(Kept& kept) const;
  void record(const torch::nn::Module& module, const std::string& name, bool is_cumulative);
  void expect_same_buffers() const;
  void follow();
  void write_rows();
  const std::vector<double>& exchange();
  void apply_to(RecordedNorm& norm, const std::vector<const double*>& changes) const;

  const std::shared_ptr<Collectives> group_;
  std::vector<Kept> norms_;
  std::size_t row_ = 0;                           ///< number of fp64 values in the message for one microbatch
  std::vector<std::vector<NormChange>> changes_;  ///< [round][norm]: the changes of this rank's microbatches
  std::vector<double> own_, all_;                 ///< the message of this rank, and the messages of all ranks
  double seconds_ = 0;
};

/// Checks that the running statistics of a module in training can be the same on any number of ranks ("reproducible").
/// Throws tessera::Error (78), which names the module and the remedy.
void expect_running_statistics(const Strategy& strategy, const torch::nn::Module& module);

}  // namespace tessera
