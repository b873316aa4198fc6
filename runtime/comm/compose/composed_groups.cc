#include "runtime/comm/compose/composed_groups.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/compose/hierarchical.h"
#include "runtime/comm/local/local_collectives.h"

namespace tessera {
namespace {

class ComposedGroupFactory : public GroupFactory {
 public:
  ComposedGroupFactory(const GroupDefaults& defaults, JoinGroup inside, JoinGroup across)
      : defaults_(defaults), inside_(std::move(inside)), across_(std::move(across)) {}

  absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name, const std::vector<int>& world_ranks,
                                                    GroupUse use) override {
    TESSERA_RETURN_IF_ERROR(check(name, world_ranks));
    if (world_ranks.size() == 1) return use == GroupUse::kCommonMemory ? std::make_shared<LocalCollectives>() : alone();
    const std::size_t hosts = members_of_hosts(world_ranks).size();
    if (hosts == 1) return inside_(group_of(name, world_ranks, use));
    if (hosts == world_ranks.size() || !evenly_spread(world_ranks)) return across_(group_of(name, world_ranks, use));
    return make_hierarchical(name, world_ranks, use);
  }

 protected:
  virtual std::shared_ptr<Collectives> alone() { return std::make_shared<LocalCollectives>(); }

 private:
  absl::Status check(const std::string& name, const std::vector<int>& ranks) const {
    const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
    const bool member = std::find(ranks.begin(), ranks.end(), defaults_.topology.rank) != ranks.end();
    if (ascending && member && ranks.front() >= 0 && ranks.back() < defaults_.topology.world_size)
      return absl::OkStatus();
    return make_error(ExitCode::kInternal, "group " + group_of(name, ranks, GroupUse::kOther).key() +
                                               " wants ascending ranks below " +
                                               std::to_string(defaults_.topology.world_size) + " with rank " +
                                               std::to_string(defaults_.topology.rank) + " among them");
  }

  Group group_of(const std::string& name, const std::vector<int>& world_ranks, GroupUse use) const {
    Group group;
    group.name = name;
    group.world_ranks = world_ranks;
    group.rank = static_cast<int>(std::find(world_ranks.begin(), world_ranks.end(), defaults_.topology.rank) -
                                  world_ranks.begin());
    group.world_size = defaults_.topology.world_size;
    group.use = use;
    group.timeout_s = defaults_.timeout_s;
    group.init_timeout_s = defaults_.init_timeout_s;
    return group;
  }

  std::map<int, std::vector<int>> members_of_hosts(const std::vector<int>& world_ranks) const {
    std::map<int, std::vector<int>> members;
    for (int rank : world_ranks) members[defaults_.topology.host_of(rank)].push_back(rank);
    return members;
  }

  bool evenly_spread(const std::vector<int>& world_ranks) const {
    const auto members = members_of_hosts(world_ranks);
    return std::all_of(members.begin(), members.end(),
                       [&](const auto& host) { return host.second.size() == members.begin()->second.size(); });
  }

  absl::StatusOr<std::shared_ptr<Collectives>> make_hierarchical(const std::string& name,
                                                                 const std::vector<int>& world_ranks,
                                                                 GroupUse use) const {
    const auto members = members_of_hosts(world_ranks);
    const std::vector<int>& neighbours = members.at(defaults_.topology.host_of(defaults_.topology.rank));
    const auto place = std::find(neighbours.begin(), neighbours.end(), defaults_.topology.rank) - neighbours.begin();
    std::vector<int> counterparts;
    for (const auto& [host, ranks] : members) counterparts.push_back(ranks[place]);
    TESSERA_ASSIGN_OR_RETURN(auto inside, inside_(group_of(name + ".inside", neighbours, use)));
    TESSERA_ASSIGN_OR_RETURN(auto across, across_(group_of(name + ".across", counterparts, use)));
    return hierarchical_collectives(std::move(inside), std::move(across));
  }

  const GroupDefaults defaults_;
  const JoinGroup inside_, across_;
};

class DeviceGroupFactory : public ComposedGroupFactory {
 public:
  DeviceGroupFactory(const GroupDefaults& defaults, DeviceGroups groups)
      : ComposedGroupFactory(defaults, by_use(groups), by_use(groups)), groups_(std::move(groups)) {}

  std::shared_ptr<Collectives> control_of(const std::shared_ptr<Collectives>& group) override {
    return groups_.control(group);
  }

 protected:
  std::shared_ptr<Collectives> alone() override { return groups_.alone(); }

 private:
  static JoinGroup by_use(const DeviceGroups& groups) {
    return [join = groups.join, on_host = groups.join_on_host](const Group& group) {
      const bool is_of_hosts = group.use == GroupUse::kOnHost || group.use == GroupUse::kCommonMemory;
      return is_of_hosts ? on_host(group) : join(group);
    };
  }

  const DeviceGroups groups_;
};

// Returns defaults that treat all ranks as one host. One transport then connects the ranks of every group, on whichever
// hosts they are.
GroupDefaults as_one_host(GroupDefaults defaults) {
  defaults.topology.put_on_hosts({defaults.topology.world_size});
  return defaults;
}

}  // namespace

std::shared_ptr<GroupFactory> composed_group_factory(const GroupDefaults& defaults, JoinGroup inside,
                                                     JoinGroup across) {
  return std::make_shared<ComposedGroupFactory>(defaults, std::move(inside), std::move(across));
}

std::shared_ptr<GroupFactory> flat_group_factory(GroupDefaults defaults, JoinGroup join) {
  return composed_group_factory(as_one_host(defaults), join, join);
}

std::shared_ptr<GroupFactory> device_group_factory(GroupDefaults defaults, DeviceGroups groups) {
  return std::make_shared<DeviceGroupFactory>(as_one_host(defaults), std::move(groups));
}

}  // namespace tessera
