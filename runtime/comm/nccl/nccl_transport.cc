#include "runtime/comm/nccl/nccl_transport.h"

#include <c10/cuda/CUDAFunctions.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/cuda/CUDAEventCache.hpp>
#include <utility>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/device/gpus.h"
#include "runtime/comm/device/queued_collectives.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/comm/nccl/nccl_memory.h"

namespace tessera {
namespace {

/// Sets the variables that control c10d and NCCL, unless the user's environment sets them.
void set_environment() {
  static std::once_flag once;
  std::call_once(once, [] {
    constexpr std::pair<const char*, const char*> kWanted[] = {
        // Communicators of one GPU must start their kernels in the order in which the host queued them, on all ranks.
        // Two communicators could otherwise wait for each other.
        {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
        // WorkWatch ends a failed call. c10d's watchdog would end the process without Tessera's message, or hold a lock
        // for a minute while all ranks write their reports.
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"},
        {"TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"},
        {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
        {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0"},
    };
    for (const auto& [name, value] : kWanted) setenv(name, value, /*overwrite=*/0);
    // torchrun sets this variable for every program.
    if (std::getenv("TORCHELASTIC_RUN_ID")) setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/1);
  });
}

/// Returns a function that returns whether the device has reached the present end of its queue.
std::function<bool()> mark_on(c10::Device gpu) {
  // The event is taken from a cache, as c10d's own events are.
  const auto event = c10d::CUDAEventCache::get(gpu.index())->create(/*timing=*/false);
  event->record(at::cuda::getCurrentCUDAStream(gpu.index()));
  return [event] { return event->query(); };
}

/// Writes c10d's flight record into one file, for `torchfrtrace`. The record has all groups of the process.
std::string write_flight_record(int world_rank) {
  static Mutex mutex;
  static std::string file ABSL_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  if (file.empty()) {
    const std::string record = c10d::dump_nccl_trace(/*includeCollectives=*/true, /*includeStackTraces=*/false,
                                                     /*onlyActive=*/false);
    c10d::DebugInfoWriter& writer = c10d::DebugInfoWriter::getWriter(world_rank);
    writer.write(record);
    file = writer.getWriterTarget();
  }
  return "flight record: " + file;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group& group, int device, NcclBuffers buffers,
                                                              std::shared_ptr<QueuedGroups> groups,
                                                              std::shared_ptr<C10dStore> store) try {
  TESSERA_RETURN_IF_ERROR(use_gpu(device));
  set_environment();
  TESSERA_RETURN_IF_ERROR(meet_in_store_or_fail(group, "met/nccl", *store));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->is_high_priority_stream = true;  // calls go first, since compute waits for them
  // c10d measures its timeout from the moment at which a call is queued, which may be long before the call starts. This
  // timeout is therefore never reached: WorkWatch limits the time from a call's start.
  options->timeout = std::chrono::hours(24 * 7);
  options->group_name = group.key();  // name and ranks, as the flight record shows them
  options->global_ranks_in_group.assign(group.world_ranks.begin(), group.world_ranks.end());
  const auto own_keys = c10::make_intrusive<c10d::PrefixStore>("nccl/" + group.key(), store->c10d_store());
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(own_keys, group.rank, group.size(), options);
  const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  backend->eagerConnectSingleDevice(gpu);
  TESSERA_ASSIGN_OR_RETURN(const std::shared_ptr<NcclMemory> memory, NcclMemory::create(backend, gpu, buffers));
  return queued_collectives(
      group,
      {.kind = TransportKind::kNccl,
       .backend = backend,
       .device = gpu,
       .groups = std::move(groups),
       .allocate = [memory](std::size_t bytes) { return memory->allocate(bytes); },
       .release_memory = [memory] { memory->release(); },
       .write_record = [rank = group.world_rank(group.rank)] { return write_flight_record(rank); },
       .mark = [gpu] { return mark_on(gpu); }},
      std::move(store));
} catch (const std::exception& error) {
  return make_error(
      ExitCode::kPeerLost,
      group.self() + ": group " + group.key() + " cannot connect with NCCL on device " + std::to_string(device) + ": " +
          text_of_c10_exception(error) +
          ". [T0474] hint: NCCL_DEBUG=INFO shows what it tried; each rank of a host needs a GPU of its own");
}

}  // namespace tessera
