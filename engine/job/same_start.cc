#include "engine/job/same_start.h"

#include <torch/headeronly/version.h>

#include <algorithm>
#include <string>
#include <vector>

#include "checkpoint/files/hash.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "runtime/config/json_differences.h"
#include "runtime/config/optimizer_rows.h"

namespace tessera {
namespace {

constexpr const char* kLabel = "strategies";

nlohmann::json start_of(const Strategy& strategy) {
  nlohmann::json start = {{"strategy", nlohmann::json::parse(strategy.to_json())}, {"build", this_build()}};
  // Each host may have directories of its own. Either all hosts have such directories, or none has them, since that
  // decides which tier "auto" chooses on a GPU.
  start["strategy"]["offload"]["paths"] = strategy.offload.paths.empty() ? "none" : "some";
  start["strategy"]["checkpoint"].erase("dir");
  start["strategy"]["durable"].erase("dir");
  // A key that the strategy leaves out has its default value here. Loading a checkpoint of a run with other defaults
  // may change this value later.
  for (const ChangedDefault& each : changed_defaults(strategy.optimizer))
    start["strategy"]["optimizer"]["left_out"].push_back(each.key);
  return start;
}

[[noreturn]] void throw_differences(const nlohmann::json& start, Collectives& control) {
  const std::string rank_0s = value_or_throw(broadcast_string(control, kLabel, text_of_json(start), 0));
  const std::string own = joined(differences(start, nlohmann::json::parse(rank_0s)), "; ");
  const std::vector<std::string> ranks = value_or_throw(gather_strings(control, kLabel, own));
  std::string text = "Engine: ranks have different strategies or builds:";
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].empty()) text += " rank " + std::to_string(rank) + ": " + ranks[rank] + ";";
  }
  text.back() = '.';
  throw Error(ExitCode::kConfig,
              text + " [T0263] hint: give every rank the same strategy file, and every host the same build");
}

}  // namespace

nlohmann::json this_build() { return {{"tessera", TESSERA_VERSION}, {"libtorch", TORCH_VERSION}}; }

void expect_same_start(const Strategy& strategy, Collectives& control) {
  if (control.size() == 1) return;
  const nlohmann::json start = start_of(strategy);
  const std::uint64_t own = checkpoint_hash(text_of_json(start));
  std::vector<std::uint64_t> all(static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather(kLabel, &own, all.data(), sizeof own).wait());
  if (std::ranges::any_of(all, [&](std::uint64_t hash) { return hash != all[0]; })) throw_differences(start, control);
}

}  // namespace tessera
