#include "tessera/init.h"

#include "runtime/base/log.h"
#include "runtime/comm/process_mesh.h"
#include "runtime/comm/topology.h"
#include "tessera/error.h"

namespace tessera {

Mesh init(const CommConfig& comm) {
  const Topology topology = value_or_throw(resolve_topology());
  set_log_rank(topology.rank, topology.world_size);
  Mesh mesh = value_or_throw(make_process_mesh(topology, comm));
  log_info(topology.describe());
  return mesh;
}

}  // namespace tessera
