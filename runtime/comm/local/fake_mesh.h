#pragma once

#include "tessera/mesh.h"

namespace tessera {

/// A mesh that is `topology.rank` of a world of any size, alone: collectives move no data beyond this rank's own part
/// and succeed. For plans and dry runs.
Mesh fake_mesh(const Topology& topology);

}  // namespace tessera
