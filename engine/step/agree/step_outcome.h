#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/device/exposed_communication.h"
#include "optim/arithmetic/step_decision.h"
#include "optim/device_kernels.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/strategy.h"

namespace tessera {

struct StepResult;

/// The inputs that all outcomes of an Engine's steps share.
struct OutcomeContext {
  std::weak_ptr<const MeshAxes>
      axes;                        ///< the groups that steps call; outcomes ask them for failures as long as they exist
  std::vector<std::string> units;  ///< names of the units, if units are updated in backward; else empty
  SpikeConfig spikes;
};

/// The decision of a GPU about one step. The host knows it once the device has come to the end of the step.
class StepOutcome {
 public:
  /// `pinned` receives the decision and is not written again before the outcome is known.
  /// `waits`: the intervals in which the step waited for collectives; all lie before `end`.
  StepOutcome(std::int64_t step, std::shared_ptr<const std::byte> pinned, ExposedCommunication::Intervals waits,
              std::shared_ptr<DeviceKernels::Mark> end, std::shared_ptr<const OutcomeContext> context)
      : step_(step),
        pinned_(std::move(pinned)),
        waits_(std::move(waits)),
        end_(std::move(end)),
        context_(std::move(context)) {}

  bool is_known() const { return decision_ || end_->passed(); }
  /// Waits until the decision is known, and returns it. Warns once if the step was skipped. Throws tessera::Error: the
  /// failure of a group if a call of it failed on the device (MeshAxes::status); 70 if ranks gathered units in
  /// different orders; 64 if ranks were given different rates or options; 65 if a gradient is not finite where units
  /// are updated in backward; 78 if the loss is negative where spikes are looked for. If 70 or 64 is thrown, no rank
  /// has updated anything. Updates in backward are an exception: the units before the first difference are updated if
  /// 70 is thrown, and all units if 64 is thrown.
  const StepDecision& wait();
  /// Returns the seconds for which the device waited for collectives in this step. REQUIRES: wait() has returned.
  double exposed_seconds() const { return exposed_seconds_; }

 private:
  void report() const;
  [[noreturn]] void throw_disagreement() const;
  [[noreturn]] void throw_other_numbers() const;

  const std::int64_t step_;
  std::shared_ptr<const std::byte> pinned_;
  ExposedCommunication::Intervals waits_;
  std::shared_ptr<DeviceKernels::Mark> end_;
  const std::shared_ptr<const OutcomeContext> context_;
  double exposed_seconds_ = 0;
  std::optional<StepDecision> decision_;
};

/// Throws tessera::Error (65) for a gradient that is not finite where units are updated in backward, since the step
/// cannot be skipped then. The text begins with `when`. `whose`: the unit or parameter that has the gradient.
[[noreturn]] void throw_not_finite_in_backward(const std::string& when, const std::string& whose);

/// Throws tessera::Error (70) if ranks gathered units in different orders and units are updated in backward. `unit`:
/// the name of the unit that is not updated.
[[noreturn]] void throw_disagreement_in_backward(const std::string& unit);

/// Writes the numbers of a decision into the result of its step.
void tell(const StepDecision& decided, StepResult& result);

void warn_of_overflow(std::int64_t step, double loss_scale, const std::string& parameters);

}  // namespace tessera
