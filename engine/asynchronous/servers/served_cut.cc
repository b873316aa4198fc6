#include "engine/asynchronous/servers/served_cut.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "runtime/config/strategy_names.h"

namespace tessera {

bool is_served_whole(OptimizerType type, bool has_matrices) { return adapts_layers(type) || has_matrices; }

ServedCut::ServedCut(std::vector<Group> groups, int servers, int pieces)
    : groups_(std::move(groups)), servers_(servers), pieces_(pieces), places_(groups_.size()) {
  std::vector<std::size_t> order(groups_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return groups_[i].numel; });
  std::vector<std::int64_t> loads(static_cast<std::size_t>(servers) * static_cast<std::size_t>(pieces));
  for (const std::size_t i : order) {
    if (!groups_[i].is_whole) continue;
    const auto least = std::ranges::min_element(loads);
    *least += groups_[i].numel;
    places_[i] = static_cast<int>(least - loads.begin());
  }
}

Extent ServedCut::shard(std::size_t group, int server, int piece) const {
  const std::int64_t numel = groups_[group].numel;
  if (!is_whole(group)) return intersect(served_part(numel, server, servers_), replica_part(numel, piece, pieces_));
  const bool is_there = server == server_of(group) && piece == piece_of(group);
  return {0, is_there ? numel : 0};
}

}  // namespace tessera
