#include <exception>

#include "engine/engine_state.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "tessera/engine.h"

namespace tessera {

struct EmaWeights::State {
  explicit State(Training& training_given) : training(training_given) {
    expect(training.job.strategy.ema.decay > 0,
           "the Engine keeps no average of its weights. [T0110] hint: set \"ema\": {\"decay\": 0.999} in the strategy");
    expect(!training.values.are_averages, "parameters are their averages already. [T0111] hint: close the other ",
           phrases::kAverages, " first");
    expect(training.window.microbatch == 0, phrases::kEma,
           " between backward and step. [T0112] hint: call step() or zero_grad() first");
    expect(training.values.open_guards == 0, phrases::kEma,
           " under a Gathered guard. [T0113] hint: close that guard first");
    training.job.or_abort("EmaWeights", [&] {
      training.expect_parameters();
      swap();
    });
    training.values.are_averages = true;
  }

  /// Exchanges parameters and averages.
  void swap() const {
    training.settle_commit();
    if (training.gathering.residency) training.gathering.residency->release_all();
    // Other ranks may still be reading the copy that they share with this rank.
    if (training.plan.placement().shared) throw_if_error(training.axes.gather->barrier("EmaWeights").wait());
    training.step->swap_averages();
    training.accept_new_values();
  }

  void close() const {
    expect(training.values.open_guards == 0, phrases::kEma,
           " ends under a Gathered guard. [T0114] hint: close that guard first");
    training.job.or_abort("EmaWeights", [&] {
      training.expect_parameters();
      swap();
    });
    training.values.are_averages = false;
  }

  Training& training;
  const int exceptions_at_start = std::uncaught_exceptions();
};

EmaWeights::EmaWeights(Engine& engine) : state_(std::make_unique<State>(engine.state_->training)) {}

void EmaWeights::close() {
  if (const std::unique_ptr<State> state = std::move(state_)) state->close();
}

/// The other ranks must also change their values back, which is collective. If an exception unwinds this rank, they
/// perhaps never do so. This rank then does not wait for them, and makes the job fail, so that the Engine does not
/// train on averages.
EmaWeights::~EmaWeights() {
  if (!state_) return;
  if (std::uncaught_exceptions() > state_->exceptions_at_start) {
    state_->training.job.fail(
        make_error(ExitCode::kInternal, "an exception left EmaWeights, and parameters are averages still"));
    return;
  }
  try {
    close();
  } catch (const std::exception& error) {
    log_error(std::string("EmaWeights: ") + error.what());
  }
}

}  // namespace tessera
