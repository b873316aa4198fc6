#include "workshop/app/plan/simulated_order.h"

#include <cstddef>
#include <set>

#include "engine/asynchronous/servers/served_part.h"
#include "offload/files/output_file.h"
#include "runtime/base/status.h"

namespace tessera::app {
namespace {

constexpr std::size_t kBytesAtATime = std::size_t{1} << 16;

}  // namespace

absl::StatusOr<SimulatedOrder> SimulatedOrder::make(const MemoryPlan& plan, const StepProfile& profile, int servers) {
  const SyncConfig& sync = plan.update().outer;
  if (sync.type != SyncType::kAsynchronous || sync.is_elastic())
    return make_error(ExitCode::kConfig,
                      "simulate --order: an order is one of ranks that push by themselves, and stay until the end. "
                      "[T1096] hint: give a strategy with \"sync\": {\"type\": \"asynchronous\"} and without "
                      "\"elastic\", or leave --order out");
  SimulatedOrder order;
  const int ranks = plan.placement().mesh.world_size();
  order.parties_ = {ranks, sync.has_servers() ? "servers" : "ranks", sync.has_servers() ? servers : ranks};
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> used, units_of(profile, plan));
  for (const int number : std::set<int>(used.begin(), used.end())) {
    const UnitShape& unit = plan.units()[static_cast<std::size_t>(number)];
    for (std::size_t group = 0; group < unit.groups.size(); ++group) {
      if (!unit.groups[group].trainable) continue;
      const std::int64_t numel = unit.groups[group].layout.numel();
      // A group that ranks own whole is one shard. One of the servers owns a whole group, and the others are not asked
      // for it, so their turns are never taken.
      const bool is_whole = plan.has_whole_shard(unit.groups[group]);
      const int owners = is_whole && !sync.has_servers() ? 1 : order.parties_.owner_count;
      for (int owner = 0; owner < owners; ++owner) {
        // If a server's part of a group is empty, ranks exchange nothing of this group with the server.
        if (!sync.has_servers() || is_whole || served_part(numel, owner, servers).numel > 0)
          order.shards_.push_back({unit.name, group, owner});
      }
    }
  }
  return order;
}

absl::Status SimulatedOrder::write_lines(const ModeTimeline& timeline,
                                         const std::function<absl::Status(std::string_view)>& write) const {
  std::vector<std::int64_t> steps(static_cast<std::size_t>(parties_.ranks), 0);
  for (const ModeStep& step : timeline.steps) ++steps[static_cast<std::size_t>(step.rank)];
  TESSERA_RETURN_IF_ERROR(write(first_line_of(parties_, steps)));
  std::int64_t number = 0, version = 0;  // `version` is the version of every shard
  for (const ModeEvent& event : timeline.events()) {
    for (std::size_t shard = 0; shard < shards_.size(); ++shard)
      TESSERA_RETURN_IF_ERROR(
          write(line_of({number++, event.step, shard, version, event.rank, event.is_push}, shards_[shard])));
    if (event.is_push) ++version;
  }
  return absl::OkStatus();
}

absl::Status SimulatedOrder::write_file(const ModeTimeline& timeline, const std::string& path,
                                        Existing existing) const {
  TESSERA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path, "simulate --order"));
  std::string lines;
  TESSERA_RETURN_IF_ERROR(write_lines(timeline, [&](std::string_view line) {
    lines += line;
    if (lines.size() < kBytesAtATime) return absl::OkStatus();
    absl::Status written = file.append(lines);
    lines.clear();
    return written;
  }));
  TESSERA_RETURN_IF_ERROR(file.append(lines));
  return file.finish(existing);
}

}  // namespace tessera::app
