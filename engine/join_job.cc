#include "engine/join_job.h"

#include "engine/run_scope.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make, const Environment& environment) {
  const Topology topology = value_or_throw(resolve_topology(environment));
  set_log_rank(topology.rank, topology.world_size);
  Mesh mesh = value_or_throw(make(topology));
  log_info(topology.describe());
  if (RunScope* scope = RunScope::current) {
    scope->mesh = mesh;
    groups_of(mesh).expect_report();
    // Made while all ranks are here: run's last act is to meet in it.
    value_or_throw(groups_of(mesh).user_group());
  }
  return mesh;
}

}  // namespace tessera
