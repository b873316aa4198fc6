#include <ATen/core/grad_mode.h>
#include <absl/status/statusor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "engine/engine_state.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

/// The numbers that each rank sends to the other ranks before a round of evaluation.
struct EvaluationRound {
  std::int64_t has_next = 0, batches = 0;
  double loss = 0.0, weight = 0.0;  ///< sums so far, with losses multiplied by weights
  std::int64_t has_wrong_weight = 0;
};

}  // namespace

Engine::Evaluation Engine::evaluate_batches(const std::function<bool()>& has_next,
                                            const std::function<std::optional<LossNumber>()>& loss_of_next) {
  Training& training = state_->training;
  training.expect_not_updated("evaluate");
  // All ranks find the same wrong arguments. They throw after or_abort has returned, since an error inside it would end
  // the job.
  const auto agreed = training.job.or_abort("evaluate", [&]() -> absl::StatusOr<Evaluation> {
    const at::NoGradGuard no_grad;
    const FlopCounter::Pause no_flop(training.times.flops ? &*training.times.flops : nullptr);
    if (training.gathering.publication)
      training.gathering.publication->finish();  // compiled code reads parameters without operators
    Collectives& control = *training.job.axes.control;
    std::vector<EvaluationRound> rounds(static_cast<std::size_t>(control.size()));
    EvaluationRound own;
    double wrong = 0;
    for (bool is_first = true;; is_first = false) {
      own.has_next = has_next() ? 1 : 0;
      throw_if_error(control.all_gather("evaluate", &own, rounds.data(), sizeof own).wait());
      const auto without = std::find_if(rounds.begin(), rounds.end(), [](const auto& r) { return r.has_next == 0; });
      if (is_first && without != rounds.end()) {
        return make_error(ExitCode::kUsage, c10::str("evaluate: rank ", without - rounds.begin(),
                                                     " has no batch. [T0158] hint: give every rank at least one"));
      }
      if (std::none_of(rounds.begin(), rounds.end(), [](const auto& r) { return r.has_next != 0; })) break;
      const std::optional<LossNumber> found = loss_of_next();
      if (!found) continue;
      if (!(std::isfinite(found->weight) && found->weight >= 0)) own.has_wrong_weight = 1, wrong = found->weight;
      if (found->weight > 0) own.loss += found->weight * found->loss;  // a loss with weight 0 may be NaN
      own.weight += found->weight;
      ++own.batches;
    }
    training.window.rounds.forget();
    // This call throws if queued work of a GPU has failed, since such work gives wrong losses.
    throw_if_error(training.axes.status());
    Evaluation result;
    for (const EvaluationRound& round : rounds) {
      result.loss += round.loss;
      result.batches += round.batches;
      result.weight += round.weight;
    }
    const auto bad = std::find_if(rounds.begin(), rounds.end(), [](const auto& r) { return r.has_wrong_weight != 0; });
    if (bad != rounds.end()) {
      return make_error(ExitCode::kUsage,
                        c10::str("evaluate: a weight on rank ", bad - rounds.begin(), " is negative or not finite",
                                 own.has_wrong_weight != 0 ? c10::str(": ", wrong) : std::string(),
                                 ". [T0159] hint: give the number of samples or tokens that the loss is a mean over"));
    }
    result.loss /= result.weight;
    return result;
  });
  return value_or_throw(agreed);
}

}  // namespace tessera
