#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "engine/device/accelerator.h"
#include "engine/device/uploader.h"
#include "engine/gradient_hooks.h"
#include "engine/memory/training_memory.h"
#include "engine/step/gradient_norm.h"
#include "engine/step/queued_step.h"
#include "engine/step/step_agreement.h"
#include "engine/step/update.h"
#include "optim/loss_scaler.h"
#include "optim/optimizer.h"
#include "sharding/op_watch.h"
#include "sharding/reducer.h"
#include "sharding/residency.h"
#include "tessera/engine.h"

namespace tessera {

/// What an Engine is made of. Members are destroyed last to first: watchers before units, units before memory.
struct Engine::State {
  State(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh);

  void set_up();
  void check_transport() const;
  StepResult step();
  void step_on_cpu(StepResult& result);
  void step_on_device(StepResult& result);
  void note_activations();
  void expect_samples(std::int64_t samples) const;
  at::Tensor seed_of(const at::Tensor& loss) const;
  void note_loss(const at::Tensor& loss);
  bool scales_loss() const { return strategy.mixed_precision.param == DType::kF16; }
  double loss_scale() const;
  double communication_seconds() const;
  void begin_next_step();
  void report_plan() const;
  MemoryUse allocated() const;
  void expect_plan() const;
  void detach_parameters();
  template <class Body>
  auto or_abort(const char* what, const Body& body);
  void fail(const absl::Status& reason);

  std::shared_ptr<torch::nn::Module> module;
  Strategy strategy;
  Mesh mesh;
  int exceptions_at_start = std::uncaught_exceptions();
  bool failed = false;

  Accelerator accelerator;
  std::optional<Uploader> uploader;
  std::unique_ptr<Optimizer> optimizer;
  LossScaler scaler;
  MeshAxes axes;
  bool shares_memory = false;  ///< the ranks of a shard group
  MemoryPlan plan;
  TrainingMemory memory;
  MemoryUse memory_use;                 ///< as allocated
  std::int64_t allocated_at_start = 0;  ///< on a GPU, by LibTorch's allocator, when set-up was over
  std::optional<std::int64_t> activation_bytes;
  std::vector<std::unique_ptr<Unit>> units;
  std::optional<GradientNorm> norm;  ///< on the CPU, as the other two of a step there
  std::optional<Reducer> reducer;
  std::optional<GradientHooks> hooks;
  std::optional<StepAgreement> agreement;
  std::optional<Update> update;
  std::optional<DeviceStep> device_step;  ///< on a GPU: in place of those three
  std::optional<Residency> residency;     ///< where parameters are sharded
  std::optional<OpWatch> watch;

  std::int64_t microbatch = 0;  ///< since the last step
  std::int64_t attempts = 0, applied = 0;
  LocalStep local;
  double communication_before = 0;
  std::chrono::steady_clock::time_point last_step_end;
};

}  // namespace tessera
