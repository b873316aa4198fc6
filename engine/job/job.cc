#include "engine/job/job.h"

#include <c10/util/Exception.h>

#include <utility>

#include "engine/job/last_words.h"
#include "engine/job/processor.h"
#include "engine/job/same_start.h"
#include "engine/memory/tensor_heap.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/config/transport_rows.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// c10::Error puts its stack below the first line.
std::string without_stack(const std::string& text) { return text.substr(0, text.find('\n')); }

[[noreturn]] void throw_out_of_memory(Job& job, const std::string& what) {
  const std::string with_hint = job.memory_story(what);
  job.fail(make_error(ExitCode::kOsResource, with_hint));
  throw Error(ExitCode::kOsResource, with_hint);
}

}  // namespace

Job::Job(std::shared_ptr<torch::nn::Module> module_given, std::shared_ptr<Strategy> strategy_given,
         const Mesh& mesh_given, OwnRules own_rules_given)
    : module(std::move(module_given)),
      given_strategy(std::move(strategy_given)),
      strategy(*given_strategy),
      mesh(mesh_given),
      own_rules(std::move(own_rules_given)) {}

void Job::join() {
  if (strategy.memory.tensor_heap) install_tensor_heap();
  const MeshShape shape = shape_of_mesh();
  position = shape.position_of(mesh.rank());
  axes = value_or_throw(groups_of(mesh).axes(shape.replicate, shape.shard));
  check_transport();
  expect_same_start(strategy, *axes.control);
  accelerator = accelerator_of(*axes.world);
  expect_same_processor(*this);
  uploader.emplace(accelerator.device, accelerator.kernels.get());
}

/// Checks that the mesh was made with the transport that the strategy file names. The mesh was made before the Engine
/// got the strategy.
void Job::check_transport() const {
  if (strategy.comm.transport == TransportChoice::kAuto) return;
  const TransportChoice wanted = strategy.comm.transport;
  const bool on_gpu = has(wanted, transport_traits::kOnGpu);
  // A job of a single rank has no transport, but it has a device.
  const bool right_device = on_gpu == (axes.world->gpu() != Collectives::kHostMemory);
  const bool right_transport = mesh.world_size() == 1 || axes.world->kind() == kind_of(wanted);
  if (right_device && right_transport) return;
  throw Error(ExitCode::kConfig, "/comm/transport is \"" + row_of(wanted).word + "\", but the mesh was made with " +
                                     axes.world->transport() + ". [T0152] hint: call " + say(phrases::kInit));
}

void Job::fail(const absl::Status& reason) {
  failed = true;
  groups_of(mesh).abort(reason);
}

void Job::rethrow(const char* what) {
  try {
    throw;
  } catch (const Error& error) {
    fail(make_error(error.exit_code(), error.message()));
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    throw_out_of_memory(*this, std::string(what) + ": " + without_stack(error.what()));
  } catch (const std::exception&) {
    const bool known = failed;
    const absl::Status status = status_of(std::current_exception());
    fail(make_error(exit_code_of(status), std::string(what) + ": " + message_of(status)));
    if (known) throw error_of(groups_of(mesh).status());
    throw;
  }
}

}  // namespace tessera
