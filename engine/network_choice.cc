#include "engine/network_choice.h"

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/comm/rounds/link_fit.h"
#include "sharding/timing/link_fit_file.h"

namespace tessera {
namespace {

constexpr char kFitKey[] = "network_fit", kAgreedKey[] = "network_fit/agreed";

absl::Status differs(const Topology& topology, const std::string& why) {
  return make_error(ExitCode::kConfig, "rank " + std::to_string(topology.rank) + "/" +
                                           std::to_string(topology.world_size) + ": " + kNetworkFitVariable + ": " +
                                           why + ". hint: set it on all ranks, to equal files, or on none");
}

}  // namespace

absl::StatusOr<NetworkChoice> choice_of_environment() {
  const char* const path = std::getenv(kNetworkFitVariable);
  if (!path || !*path) return NetworkChoice();
  TESSERA_ASSIGN_OR_RETURN(const LinkFit fit, read_link_fit(path));
  return NetworkChoice{choose_by(fit), to_json(fit)};
}

absl::Status agree_on_choice(const NetworkChoice& own, const Topology& topology, KeyValueStore& store,
                             double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::milliseconds timeout(static_cast<std::int64_t>(timeout_s * 1000));
  if (own.fit.empty() || topology.world_size == 1) return absl::OkStatus();
  if (topology.rank == 0) {
    TESSERA_RETURN_IF_ERROR(store.set(kFitKey, own.fit));
    for (const auto end = Clock::now() + timeout;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
      TESSERA_ASSIGN_OR_RETURN(const std::int64_t agreed, store.add(kAgreedKey, 0));
      if (agreed == topology.world_size - 1) return absl::OkStatus();
      if (Clock::now() > end)
        return differs(topology,
                       std::to_string(topology.world_size - 1 - agreed) + " of the other ranks have none, or another");
    }
  }
  const auto first = store.get(kFitKey, timeout);
  if (!first.ok()) return differs(topology, "rank 0 has none");
  if (*first != own.fit) return differs(topology, "rank 0 has another");
  return store.add(kAgreedKey, 1).status();
}

}  // namespace tessera
