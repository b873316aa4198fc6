#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine_saving.h"
#include "engine/job/job.h"
#include "engine/training/training.h"
#include "tessera/engine.h"

namespace tessera {

/// The parts of an Engine. Code that needs one part gets only that part. Training and Saving both refer to the Job, and
/// not to each other.
struct Engine::State {
  /// `continues_after`: the number of steps that training has made, if planned_anew makes the State; no value if an
  /// Engine begins. The number decides whether outer steps are in effect (SyncConfig::start_step). If it is given, each
  /// rank's buffers stay as they are.
  State(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Strategy> strategy, const Mesh& mesh,
        OwnRules own_rules, std::optional<std::int64_t> continues_after);
  /// Calls `change`, and then plans anew: returns a State over the same module, which continues with the values,
  /// optimizer states and counts of this State. This State must not be used afterwards. Call it between steps. It is
  /// collective. `other`: a strategy with more groups of parameters, in place of the strategy that the Engine has.
  std::unique_ptr<State> planned_anew(std::int64_t steps, const std::function<void()>& change,
                                      std::shared_ptr<Strategy> other = nullptr);
  /// Throws tessera::Error (64) if planning anew is not allowed at this time. `what`: the name of the call.
  void expect_may_plan_anew(const char* what) const;
  /// Plans `state` anew if outer steps begin or end with step `steps`. Returns whether it did. Call it between steps.
  /// It is collective if it plans anew.
  static bool follow_sync(std::unique_ptr<State>& state, std::int64_t steps);

  /// Returns, for each engine, the factor for its gradients. The factor corrects for the difference between the first
  /// engine's loss scale and the engine's own loss scale.
  static std::vector<at::Tensor> factors_of(const std::vector<Engine*>& engines, const LossSeed& first);
  static void run_backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info);

  Job job;
  Training training;
  Saving saving;

 private:
  void set_up(bool continues);
};

}  // namespace tessera
