#pragma once

// See docs/glossary.md: agreement, slot, unit.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/device/accelerator.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/agree/step_outcome.h"
#include "engine/step/queued/device_tables.h"
#include "engine/step/queued/device_update.h"
#include "engine/step/queued/queued_norm.h"
#include "engine/step/step.h"
#include "optim/device_kernels.h"
#include "optim/grad_norm.h"
#include "optim/optimizer.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/compute_device.h"
#include "sharding/reduce/reducer.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The step of an Engine on a GPU: norm, agreement, decision and update. The host queues them without waiting. The
/// agreement of ranks, and the decisions that follow from it, have the same bits as in CpuStep on the CPU.
/// DeviceUpdate makes the update.
///
/// If units are updated in backward (OptimizerConfig::in_backward), each unit begins separately: the device checks that
/// the unit's gradients are finite, and counts the step for the unit's parameters. The host knows the rate beforehand,
/// since no step is skipped. Messages are still exchanged at the end of the step. They tell all ranks whether all
/// gradients of the step were finite.
///
/// If the host need not wait for each step's decision (DeviceUpdate), it may be kMostStepsInFlight steps ahead of the
/// device. Before it goes further ahead, it waits for the oldest step.
class QueuedStep final : public Step {
 public:
  QueuedStep(const StepContext& context, const Optimizer& optimizer, Accelerator& accelerator);

  LossSeed seed_of(const at::Tensor& loss, double weight) const override;
  void add_loss(const at::Tensor& loss, double weight, std::int64_t round) override;
  /// Begins to bring records to the memory in which the update uses them.
  void expect_update(std::span<const int> order) override;
  void reduced(const Unit& unit) override;
  void update(Unit& unit, const UnitAgreement& agreed) override;
  /// Fields that only the device will know stay NaN, and `result` fetches them later (StepResult::wait).
  void run(const LocalStep& local, StepResult& result) override;
  void set_lr(double lr, std::optional<std::size_t> group) override { numbers_.rates.set(lr, group); }
  double lr(std::optional<std::size_t>) const override;
  UpdateOptions& options() override { return numbers_.options; }
  void swap_averages() override;
  GradientSquares* own_squares() override { return squares_ ? &*squares_ : nullptr; }
  void forget_losses() override;
  /// Returns the result for the step that is kMostStepsInFlight before the latest step. The host has waited for that
  /// step on every rank.
  const std::vector<char>* known_used() const override {
    return flight_.known_used.empty() ? nullptr : &flight_.known_used;
  }
  /// The next three functions wait for the latest step.
  double loss_scale() const override { return scales_loss() ? latest().scaler.scale : 1.0; }
  std::int64_t applied() const override { return latest().so_far.applied; }
  std::int64_t samples_seen() const override { return latest().so_far.samples; }
  /// The next two functions wait for all steps under way. They throw the errors of StepOutcome::wait.
  StepProgress progress() const override;
  void resume(const StepProgress& progress) override;
  /// The host does not know this time. The device measures it, and StepResult::wait asks the device.
  double communication_seconds() const override { return 0; }
  std::int64_t streamed_bytes() const override { return update_.streamed_bytes(); }
  HostStepBytes host_step() const override { return update_.host_step(); }

 private:
  struct InFlight {
    /// pinned memory for the host's part of a message, and for the decision of the device
    std::shared_ptr<std::byte> message, decision;
    std::shared_ptr<std::byte> numbers;  ///< pinned memory for StepTables::group_numbers
    /// pinned memory for the flags of AgreedStep::used, which come back from the device
    std::shared_ptr<std::byte> used;
    std::shared_ptr<DeviceKernels::Mark> used_arrived;
    std::shared_ptr<StepOutcome> outcome;  ///< outcome of the step that last used this slot
  };

  /// The update's numbers, which a program may change, and the numbers that the device has.
  struct Numbers {
    explicit Numbers(const OptimizerConfig& optimizer) : rates(optimizer), options(optimizer) {}

    LearningRates rates;
    UpdateOptions options;
    std::uint64_t followed = 0;           ///< version of the options that the update uses
    std::vector<GroupNumbers> of_groups;  ///< numbers of groups, without rates set by hand, which are added when the
                                          ///< numbers are sent
    GroupNumbers* there = nullptr;        ///< StepTables::group_numbers
  };

  /// This rank's message, and the messages of all ranks, in the device's memory.
  struct Message {
    std::byte* own = nullptr;
    std::byte* of_all = nullptr;
  };

  /// Views of numbers in the device's memory, for LibTorch's operators.
  struct Views {
    at::Tensor loss, own_squares;  ///< they lie in the message
    at::Tensor losses;             ///< losses in the message, under "reproducible": [round, 2], as in
                                   ///< MicrobatchLoss
    at::Tensor loss_scale;         ///< lies in the decision: a scalar, fp32
  };

  /// Events of the device, which later work waits for.
  struct Marks {
    std::unique_ptr<DeviceKernels::Mark> uploaded;         ///< the host's part of the message is on the device
    std::unique_ptr<DeviceKernels::Mark> messages_read;    ///< the previous step has read the messages
    std::unique_ptr<DeviceKernels::Mark> numbers_read;     ///< the previous step has read each group's numbers
                                                           ///< (GroupNumbers)
    std::shared_ptr<DeviceKernels::Mark> used_downloaded;  ///< the latest step's flags are on the host
    std::shared_ptr<DeviceKernels::Mark> downloaded;       ///< the latest decision is on the host
  };

  /// The queued steps. The host knows the outcomes of all older steps.
  struct Flight {
    std::array<InFlight, kMostStepsInFlight> ring;
    std::int64_t resumed_at = 0;   ///< StepProgress::applied at the last Step::resume
    std::int64_t steps = 0;        ///< steps queued since the last Step::resume
    std::vector<char> known_used;  ///< see QueuedStep::known_used
  };

  /// The progress of the next step's backwards.
  struct Backward {
    bool is_begun = false;        ///< whether a unit of the step has begun, if units are updated in backward
    bool sums_are_steps = false;  ///< true from the beginning of a step's last backward to the step's end
  };

  /// Returns the latest step's decision, and waits for it.
  StepDecision latest() const;
  void wait_for_all() const;
  std::shared_ptr<StepOutcome> queue(const LocalStep& local, std::int64_t number);
  void join_downloads() const;
  InFlight& take_slot();
  void send_numbers(InFlight& slot);
  void follow_options();
  bool scales_loss() const { return strategy_.mixed_precision.param == DType::kF16; }
  bool updates_in_backward() const { return tables_.updates_in_backward; }
  bool watches_for_spikes() const { return strategy_.on_spike.action != SpikeAction::kNone; }
  void plan_message();
  void allocate(const LossScalerState& scaler);
  void fill_tables(const std::vector<int>& ranks_with_parts);
  void send_host_part(InFlight& slot, const LocalStep& local);
  StepRequest request() const;

  const std::shared_ptr<const MeshAxes> axes_;
  const Reducer& reducer_;
  const Strategy& strategy_;
  DeviceKernels& kernels_;
  ExposedCommunication& exposed_;
  const ComputeDevice device_;
  Numbers numbers_;
  NormTotals totals_;
  std::shared_ptr<const OutcomeContext> of_outcomes_;
  DeviceTables memory_;  ///< the memory of all tables below
  Message message_;
  StepTables tables_;
  DeviceUpdate update_;
  StepRequest request_;                   ///< the fields of requests that do not change from step to step
  std::optional<QueuedNorm> norm_;        ///< made with the tables
  std::optional<QueuedSquares> squares_;  ///< set with "noise_scale"
  Views views_;
  Marks marks_;
  Flight flight_;
  Backward backward_;
};

}  // namespace tessera
