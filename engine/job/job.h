#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>
#include <torch/nn/module.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/device/accelerator.h"
#include "engine/device/uploader.h"
#include "engine/job/mesh_shape.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/placement.h"
#include "tessera/mesh.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"

namespace tessera {

/// The first of an Engine's three parts: the module and strategy, the ranks and the device, and the handling of
/// failures. Training and Saving refer to it, and it outlives them.
struct Job {
  Job(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Strategy> strategy, const Mesh& mesh,
      OwnRules own_rules);

  /// Makes the groups of the mesh and finds this rank's device. It is collective. Throws tessera::Error: 78 if ranks
  /// have different strategies, or if the mesh has another transport than the strategy asks for; and the error of
  /// expect_same_processor.
  void join();
  MeshShape shape_of_mesh() const { return mesh_shape(strategy, mesh.topology()); }

  /// Runs `body`. If `body` throws, the other ranks get the reason, so that none of them waits for this rank. Then this
  /// function throws the reason that came first on any rank, so that all ranks throw the same error. An operator whose
  /// unit could not be gathered throws an error of LibTorch, which is only a consequence of that reason.
  template <class Body>
  auto or_abort(const char* what, const Body& body) {
    try {
      return body();
    } catch (const std::exception&) {
      rethrow(what);
    }
  }
  /// Aborts the groups on all ranks, with `reason`.
  void fail(const absl::Status& reason);

  const std::shared_ptr<torch::nn::Module> module;
  const std::shared_ptr<Strategy>
      given_strategy;  ///< lives as long as the Engine; changed by Training::use_defaults and set_epoch_samples
  const Strategy& strategy;
  Mesh mesh;
  const OwnRules own_rules;
  int exceptions_at_start = std::uncaught_exceptions();
  bool failed = false;
  /// Returns a text: `what`, then the plan, and a strategy that would need less memory. Training sets this function.
  std::function<std::string(const std::string& what)> memory_story;

  Accelerator accelerator;
  std::optional<Uploader> uploader;
  MeshAxes axes;  ///< axes of the whole mesh; see Training::axes
  MeshPosition position;

 private:
  void check_transport() const;
  /// Throws the error that ended the group, if the exception of an operator is only a consequence of it.
  [[noreturn]] void rethrow(const char* what);
};

}  // namespace tessera
