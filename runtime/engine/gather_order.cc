#include "runtime/engine/gather_order.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kNoUnit = -1;  // behind the end of a shorter order

std::string describe(int unit, const std::vector<std::unique_ptr<Unit>>& units) {
  return unit == kNoUnit ? "nothing more" : "unit " + units[static_cast<std::size_t>(unit)]->name;
}

}  // namespace

std::uint64_t digest_of_gathers(std::span<const int> units) { return XXH3_64bits(units.data(), units.size_bytes()); }

void throw_first_difference(std::span<const int> own, const MeshAxes& axes,
                            const std::vector<std::unique_ptr<Unit>>& units) {
  Collectives& world = *axes.world;
  const auto ranks = static_cast<std::size_t>(world.size()), shards = static_cast<std::size_t>(axes.shard_size);
  const std::uint64_t length = own.size();
  std::vector<std::uint64_t> lengths(ranks);
  throw_if_error(world.all_gather("gathers of a step", &length, lengths.data(), sizeof length).wait());
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<int> order(own.begin(), own.end()), orders(ranks * longest);
  order.resize(longest, kNoUnit);
  throw_if_error(world.all_gather("order of gathers", order.data(), orders.data(), longest * sizeof(int)).wait());

  const std::string own_name = "rank " + std::to_string(world.rank()) + "/" + std::to_string(world.size());
  for (std::size_t first = 0; first < ranks; first += shards) {
    for (std::size_t rank = first + 1; rank < first + shards; ++rank) {
      const auto [one, other] = std::mismatch(&orders[first * longest], &orders[first * longest] + longest,
                                              &orders[rank * longest]);
      if (one == &orders[first * longest] + longest) continue;
      throw Error(ExitCode::kInternal,
                  own_name + ": ranks gathered units in different orders, so their values cannot be trusted: gather " +
                      std::to_string(one - &orders[first * longest] + 1) + " of this step was of " +
                      describe(*one, units) + " on rank " + std::to_string(first) + ", of " + describe(*other, units) +
                      " on rank " + std::to_string(rank) +
                      ". hint: forward must use units in the same order on every rank; a branch on a rank's data may "
                      "choose only among replicated parameters");
    }
  }
  throw Error(ExitCode::kInternal, own_name + ": ranks' digests of their gathers differ, but not the gathers");
}

}  // namespace tessera
