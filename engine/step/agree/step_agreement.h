#pragma once

// See docs/glossary.md: unit.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/step_context.h"
#include "optim/arithmetic/noise_rule.h"
#include "optim/arithmetic/step_decision.h"
#include "optim/arithmetic/step_messages.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/reduce/reducer.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Adds losses up in the tree of a step's sums (SumCounter), whichever ranks computed the microbatches. `of(rank)`
/// returns a rank's microbatches [round]. REQUIRES: begin < end.
template <class OfRank>
MicrobatchLoss sum_of_losses(const MicrobatchOrder& order, const OfRank& of, std::int64_t begin, std::int64_t end) {
  if (end - begin == 1) {
    const int rank = order.rank_of(begin);
    return of(rank)[static_cast<std::size_t>(order.round_of(begin))];
  }
  const auto numel = static_cast<std::uint64_t>(end - begin);
  const std::int64_t middle = begin + static_cast<std::int64_t>(std::bit_floor(numel - 1));
  const MicrobatchLoss left = sum_of_losses(order, of, begin, middle), right = sum_of_losses(order, of, middle, end);
  return {left.loss + right.loss, left.weight + right.weight};
}

/// Returns the world ranks whose parts make up a whole buffer, each part once, in order of the parts.
std::vector<int> owners_of_parts(const AxisPlacement& placement, const MeshAxes& axes);

/// Returns a digest that is equal on ranks with equal learning rates and options (LearningRates::all,
/// UpdateOptions::all).
std::uint64_t digest_of_numbers(std::span<const double> rates, std::span<const double> options);

/// The data that one rank has at the end of a step's backward.
struct LocalStep {
  double loss = 0.0;    ///< this rank's sum of weight * loss, divided by a rank's mean number of microbatches a step
  double weight = 0.0;  ///< sum of the weights of this rank's microbatches (MicrobatchInfo::weight)
  std::int64_t tokens = 0, samples = 0;
  std::span<const int> gathered;    ///< units gathered in this step, in order (GatherLog::entries)
  std::span<const double> rates;    ///< LearningRates::all
  std::span<const double> options;  ///< UpdateOptions::all
  double busy_seconds = 0;          ///< seconds since the last step, without waits for other ranks
  OwnGradients own;                 ///< squared norms of own gradients, if measured (Strategy::noise_scale); else 0
};

/// The data on which all ranks agree before the update, with the same bits everywhere.
struct AgreedStep : AgreedSums {
  /// sum of squares of all gradients, after their sum over ranks and without the loss scale
  double sum_of_squares = 0.0;
  bool finite = true;
  /// [trainable parameter, in unit, group, layout order]: whether any rank gave it a gradient.
  std::vector<char> used;
  /// [FlatParameter::number]: each parameter's share of sum_of_squares; 0 for frozen ones.
  std::vector<double> squares;
  std::vector<double> busy_seconds;  ///< [rank of the axes' world]
  OwnGradients own;                  ///< sum of LocalStep::own over ranks, in rank order
};

/// Writes this rank's numbers into its message: the header, and OwnGradients if messages have it.
void write_numbers(const LocalStep& local, const StepMessages& layout, std::byte* message);

/// Writes which parameters of a group got a gradient, from `flag` on. Returns the place of the next group's flags.
std::byte* write_flags(const FlatGroup& group, const Reducer& reducer, std::byte* flag);

/// Makes every rank agree, with one small all-gather a step. CpuStep calls it; QueuedStep does the same on a GPU. The
/// norm is a tree over each parameter's own blocks, and a sum over parameters in order of registration. So it has the
/// same bits however parameters are put into units and gradients are sharded (optim/grad_norm.h).
///
/// StepMessages (optim/arithmetic/step_messages.h) describes a rank's message. All messages are as long as the longest.
/// The size is fixed, so everything is allocated once.
class StepAgreement {
 public:
  StepAgreement(const StepContext& context, GradientNorm& norm);

  /// It is collective. The result is valid until the next call. Throws where ranks gathered units in different orders
  /// (70), or were given different learning rates or options (64). The message names the first difference. `losses`
  /// [round]: the losses of this rank's microbatches if Strategy::reproducible is set, else empty. If it is set, the
  /// loss and the weight are sums in the tree over all microbatches.
  const AgreedStep& agree(const LocalStep& local, std::span<const MicrobatchLoss> losses);

  /// From the next step on, `losses` belong to the microbatches of `order`. REQUIRES: the longest run that `order`
  /// allows is at most as long as the longest run of the order before.
  void deal(const MicrobatchOrder& order) { order_ = order; }

  /// Returns the seconds spent so far on the exchange of messages.
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  void write_message(const LocalStep& local, std::span<const MicrobatchLoss> losses);
  void exchange();
  /// Reads the messages of the first `heard` ranks.
  void read_messages(int heard);
  void check_gathers(std::span<const int> own) const;
  void check_numbers(const LocalStep& own) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  const MeshAxes& axes_;
  const Reducer& reducer_;
  GradientNorm& norm_;
  const OptimizerConfig& optimizer_;
  std::vector<int> ranks_with_parts_;  ///< ranks whose parts together make up all gradients, each part once
  NormTotals totals_;
  MicrobatchOrder order_;
  const int first_rank_;  ///< StepContext::first_rank
  StepMessages layout_;
  std::vector<std::byte> message_, messages_;
  std::vector<const double*> sums_;  ///< [part]: the part's sums in the message of its rank
  AgreedStep agreed_;
  double exchange_seconds_ = 0;
};

}  // namespace tessera
