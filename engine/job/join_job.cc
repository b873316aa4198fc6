#include "engine/job/join_job.h"

#include <ATen/Parallel.h>

#include <string>

#include "engine/job/run_scope.h"
#include "runtime/base/errno_hint.h"
#include "runtime/base/log.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/rank_name.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {
namespace {

/// Starts the threads now, so that an error names this rank. Otherwise libgomp would end the process in the first
/// operator.
void expect_threads(const Topology& topology) {
  const int threads = at::get_num_threads();
  if (const int error = try_threads(threads); error != 0)
    throw Error(ExitCode::kOsResource, rank_name(topology.rank, topology.world_size) + ": cannot start " +
                                           std::to_string(threads) + " threads to compute with: " + reason_of(error));
}

}  // namespace

Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make, const Environment& environment) {
  const Topology topology = value_or_throw(resolve_topology(environment));
  set_log_rank(topology.rank, topology.world_size);
  take_process_limits();
  expect_threads(topology);
  Mesh mesh = value_or_throw(make(topology));
  log_info(topology.describe());
  if (RunScope* scope = RunScope::current) {
    scope->mesh = mesh;
    groups_of(mesh).expect_report();
    // The group is made while all ranks are here. When `run` ends, it waits for all ranks in this group.
    value_or_throw(groups_of(mesh).user_group());
  }
  return mesh;
}

}  // namespace tessera
