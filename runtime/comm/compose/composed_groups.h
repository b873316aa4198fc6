#pragma once

#include <functional>
#include <memory>

#include "runtime/comm/group.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

/// Makes this rank's side of one group with one transport.
using JoinGroup = std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group&)>;

/// The values that all groups of a rank have in common.
struct GroupDefaults {
  Topology topology;  ///< the rank, and which ranks share a host
  double timeout_s = 600.0;
  double init_timeout_s = 300.0;
};

/// Returns a factory that chooses the transport of each group by this table:
///
/// | ranks of the group                  | transport                                  |
/// |-------------------------------------|--------------------------------------------|
/// | this rank alone                     | solo: no memory, no sockets                |
/// | all on one host                     | inside                                     |
/// | one per host                        | across                                     |
/// | the same number > 1 on each host    | hierarchical(inside, across)               |
/// | any other ranks                     | across, for all ranks                      |
///
/// The topology defines the meaning of "host" (Topology::host_of). If hosts hold unequal numbers of ranks, the last row
/// holds for the group of all ranks.
std::shared_ptr<GroupFactory> composed_group_factory(const GroupDefaults& defaults, JoinGroup inside, JoinGroup across);

/// Returns a factory that uses one transport for every group of more than one rank, on whichever hosts its ranks are.
std::shared_ptr<GroupFactory> flat_group_factory(GroupDefaults defaults, JoinGroup join);

/// The functions that make groups whose calls move a GPU's memory, on whichever hosts their ranks are.
struct DeviceGroups {
  /// function that joins a group of more than one rank
  JoinGroup join;
  /// function that makes a group of this rank only
  std::function<std::shared_ptr<Collectives>()> alone;
  std::function<std::shared_ptr<Collectives>(std::shared_ptr<Collectives>)> control;  ///< GroupFactory::control_of
  /// like join, but for the memory of the hosts (GroupUse::kOnHost and kCommonMemory)
  JoinGroup join_on_host;
};
/// Returns a factory that makes all groups with the functions of `groups`.
std::shared_ptr<GroupFactory> device_group_factory(GroupDefaults defaults, DeviceGroups groups);

}  // namespace tessera
