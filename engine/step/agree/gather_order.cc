#include "engine/step/agree/gather_order.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <string>

#include "runtime/base/rank_name.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "sharding/gather/gather_log.h"

namespace tessera {
namespace {

constexpr int kNoUnit = -1;  // stands for the missing entries of a shorter order

std::string describe(int entry, const std::vector<std::unique_ptr<Unit>>& units) {
  if (entry == kNoUnit) return "nothing more";
  const bool is_guard = entry < kNoUnit;
  const Unit& unit = *units[static_cast<std::size_t>(is_guard ? GatherLog::guard_code(entry) : entry)];
  return (is_guard ? "a Gathered guard over unit " : "unit ") + unit.name;
}

}  // namespace

std::uint64_t digest_of_gathers(std::span<const int> units) { return XXH3_64bits(units.data(), units.size_bytes()); }

void throw_first_difference(std::span<const int> own, const MeshAxes& axes,
                            const std::vector<std::unique_ptr<Unit>>& units) {
  Collectives& world = *axes.control;
  const auto* bytes = reinterpret_cast<const char*>(own.data());
  const auto orders = value_or_throw(gather_strings(world, "gathers of a step", {bytes, own.size_bytes()}));
  // A rank that leaves ends its connections. So no rank leaves before all ranks have read the orders.
  world.barrier("gathers of a step").wait().IgnoreError();
  const auto unit_of = [&](int rank, std::size_t gather) {
    int unit = kNoUnit;
    const std::string& order = orders[static_cast<std::size_t>(rank)];
    if (gather < order.size() / sizeof unit) std::memcpy(&unit, &order[gather * sizeof unit], sizeof unit);
    return unit;
  };
  const std::string own_name = rank_name(world.rank(), world.size());
  for (int rank = 0; rank < world.size(); ++rank) {
    const int first = rank - rank % axes.shard_size;
    if (orders[static_cast<std::size_t>(first)] == orders[static_cast<std::size_t>(rank)]) continue;
    std::size_t gather = 0;
    while (unit_of(first, gather) == unit_of(rank, gather)) ++gather;
    throw Error(ExitCode::kInternal,
                own_name + ": ranks gathered units in different orders, so their values cannot be trusted: gather " +
                    std::to_string(gather + 1) + " of this step was of " + describe(unit_of(first, gather), units) +
                    " on rank " + std::to_string(first) + ", of " + describe(unit_of(rank, gather), units) +
                    " on rank " + std::to_string(rank) +
                    ". [T0280] hint: all ranks make Gathered guards, and use units in forward, in the same order; a "
                    "branch on a rank's data may choose only among replicated parameters");
  }
  throw Error(ExitCode::kInternal, own_name + ": ranks' digests of their gathers differ, but not the gathers");
}

}  // namespace tessera
