#include "runtime/comm/local/fake_mesh.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {
namespace {

class FakeGroupFactory : public GroupFactory {
 public:
  explicit FakeGroupFactory(const Topology& topology) : topology_(topology) {}
  absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string&, const std::vector<int>& ranks,
                                                    GroupUse) override {
    const auto place = std::find(ranks.begin(), ranks.end(), topology_.rank) - ranks.begin();
    const bool one_host = topology_.host_of(ranks.front()) == topology_.host_of(ranks.back());
    return std::shared_ptr<Collectives>(std::make_shared<LocalCollectives>(
        static_cast<int>(place), static_cast<int>(ranks.size()), one_host, one_host ? 0 : ranks_of_host(ranks)));
  }

 private:
  /// Returns the compressed_part() of a group over several hosts: the number of its ranks on each host, since the ranks
  /// of a host are summed first. It is 1 if hosts have different numbers of ranks.
  int ranks_of_host(const std::vector<int>& ranks) const {
    std::map<int, int> counts;
    for (int rank : ranks) ++counts[topology_.host_of(rank)];
    const int count = counts.begin()->second;
    const bool is_even =
        std::all_of(counts.begin(), counts.end(), [&](const auto& host) { return host.second == count; });
    return is_even ? count : 1;
  }

  const Topology topology_;
};

}  // namespace

Mesh fake_mesh(const Topology& topology) {
  return make_mesh(topology, std::make_shared<FakeGroupFactory>(topology), memory_store());
}

}  // namespace tessera
