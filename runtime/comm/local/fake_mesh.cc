#include "runtime/comm/local/fake_mesh.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {
namespace {

class FakeGroupFactory : public GroupFactory {
 public:
  explicit FakeGroupFactory(const Topology& topology)
      : rank_(topology.rank), ranks_per_host_(topology.local_world_size) {}
  absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string&, const std::vector<int>& ranks,
                                                    GroupUse) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    const bool one_host = ranks.front() / ranks_per_host_ == ranks.back() / ranks_per_host_;
    return std::shared_ptr<Collectives>(
        std::make_shared<LocalCollectives>(static_cast<int>(place), static_cast<int>(ranks.size()), one_host));
  }

 private:
  const int rank_, ranks_per_host_;
};

}  // namespace

Mesh fake_mesh(const Topology& topology) {
  return make_mesh(topology, std::make_shared<FakeGroupFactory>(topology), memory_store());
}

}  // namespace tessera
