#pragma once

#include <functional>
#include <memory>

#include "runtime/comm/group.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

/// Makes this rank's side of one group with one transport.
using JoinGroup = std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group&)>;

/// What every group of a rank has in common.
struct GroupDefaults {
  int rank = 0;  ///< in the world
  int world_size = 1;
  int ranks_per_host = 1;  ///< ranks are numbered host by host
  double timeout_s = 600.0;
  double init_timeout_s = 300.0;
};

/// The rule that says which transport joins which ranks:
///
/// | ranks of the group                  | transport                                  |
/// |-------------------------------------|--------------------------------------------|
/// | this one alone                      | solo: no memory, no sockets                |
/// | all on one host                     | inside                                     |
/// | one a host                          | across                                     |
/// | the same number > 1 on each host    | hierarchical(inside, across)               |
/// | anything else                       | across, for all                            |
///
/// `ranks_per_host` decides what "host" means.
std::shared_ptr<GroupFactory> composed_group_factory(const GroupDefaults& defaults, JoinGroup inside, JoinGroup across);

/// One transport for every group of more than one rank, wherever its ranks are.
std::shared_ptr<GroupFactory> flat_group_factory(GroupDefaults defaults, JoinGroup join);

/// How groups are made whose calls move a GPU's memory, wherever their ranks are.
struct DeviceGroups {
  JoinGroup join;                                                                     ///< of more than one rank
  std::function<std::shared_ptr<Collectives>()> alone;                                ///< of this rank only
  std::function<std::shared_ptr<Collectives>(std::shared_ptr<Collectives>)> control;  ///< GroupFactory::control_of
};
std::shared_ptr<GroupFactory> device_group_factory(GroupDefaults defaults, DeviceGroups groups);

}  // namespace tessera
