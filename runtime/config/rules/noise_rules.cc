#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/strategy_keys.h"

// This file has the checks of the settings that "noise_scale" excludes. The check that there are enough microbatches is
// made when the Engine plans (engine/memory/make_plan.cc).

namespace tessera {
namespace {

/// Makes a check that a setting is not used together with "noise_scale". `more` is the end of the remedy.
StrategyRule never_measured_with(std::string other, std::string what, std::function<bool(const Strategy&)> holds,
                                 const char* why, const char* more) {
  return {{"/noise_scale/every", std::move(other)},
          fmt::format("noise_scale goes without {}: {}.", what, why),
          [holds, what, why, more](const Strategy& s) -> std::string {
            if (s.noise_scale.every == 0 || !holds(s)) return "";
            return fmt::format("cannot stand beside {}: {}. [T0834] hint: leave one of them out{}", what, why, more);
          }};
}

}  // namespace

std::vector<StrategyRule> noise_rules() {
  return {
      never_measured_with(
          "/compression/gradients", "compression.gradients or sums of int8 or int4",
          [](const Strategy& s) { return is_lossy(s.compression.gradients) || is_lossy(s.compression.sums); },
          "rounding adds noise of its own to the mean of all ranks, which would count as the data's",
          "; \"lossless\" goes with it"),
      never_measured_with(
          "/compression/method", "a compression.method", [](const Strategy& s) { return s.compression.has_method(); },
          "what ranks sum is not their gradients, so its norm does not belong to theirs", ""),
      never_measured_with(
          "/sync/type", "sync.type asynchronous, backups or hogwild",
          [](const Strategy& s) { return s.sync.has_common_parameters(); }, "no rank knows the mean of all gradients",
          ""),
      never_measured_with(
          "/reproducible", "reproducible", [](const Strategy& s) { return s.reproducible; },
          "squares are added up rank by rank, so another number of ranks would have other bits in its results", "")};
}

}  // namespace tessera
