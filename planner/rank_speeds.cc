#include "planner/rank_speeds.h"

#include <fmt/format.h>

#include <string>

#include "runtime/base/status.h"

namespace tessera {
namespace {

absl::Status refuse(const std::string& what) { return make_error(ExitCode::kUsage, "simulated world: " + what); }

bool is_within(double value, double least, double most) { return value >= least && value <= most; }

}  // namespace

absl::Status check_world(const WorldOptions& options, int ranks) {
  constexpr double kMostJitter = 10, kMostFactor = 1e6, kMostStall = 1e6;
  constexpr std::int64_t kMostSteps = 100000;
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < ranks; };
  if (ranks > kMostSimulatedRanks)
    return refuse(fmt::format("wants at most {} ranks, got a mesh of {}. [T0630] hint: simulate fewer, and scale",
                              kMostSimulatedRanks, ranks));
  if (!is_within(options.jitter, 0, kMostJitter))
    return refuse(
        fmt::format("jitter must be from 0 to {}, got {}. [T0631] hint: 0.05 is usual", kMostJitter, options.jitter));
  if (options.steps < 1 || options.steps > kMostSteps)
    return refuse(fmt::format("steps must be from 1 to {}, got {}. [T0632] hint: a few dozen tell enough", kMostSteps,
                              options.steps));
  if (!is_within(options.stall_share, 0, 1) || !is_within(options.stall_s, 0, kMostStall))
    return refuse(
        fmt::format("a stall must have a share from 0 to 1 and from 0 to {:g} seconds, got {} and {}. [T1056] hint: "
                    "0.02 and 1 stop a rank for a second in one of 50 steps",
                    kMostStall, options.stall_share, options.stall_s));
  for (const auto& [rank, factor] : options.stragglers) {
    if (!is_rank(rank))
      return refuse(
          fmt::format("a straggler is rank {}, and the mesh has {}. [T0633] hint: ranks count from 0", rank, ranks));
    if (!is_within(factor, 0, kMostFactor) || factor == 0)
      return refuse(fmt::format(
          "the factor of straggler {} must be above 0 and at most {:g}, got {}. [T0634] hint: 2 takes twice as long",
          rank, kMostFactor, factor));
  }
  for (const int rank : options.traced) {
    if (!is_rank(rank))
      return refuse(
          fmt::format("a traced rank is {}, and the mesh has {}. [T0635] hint: ranks count from 0", rank, ranks));
  }
  return absl::OkStatus();
}

RankSpeeds::RankSpeeds(const WorldOptions& options, int ranks)
    : jitter_(options.jitter, options.seed),
      stall_share_(options.stall_share),
      stall_s_(options.stall_s),
      of_rank_(static_cast<std::size_t>(ranks), 1.0) {
  for (const auto& [rank, factor] : options.stragglers) of_rank_[static_cast<std::size_t>(rank)] = factor;
}

}  // namespace tessera
