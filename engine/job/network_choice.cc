#include "engine/job/network_choice.h"

#include <chrono>
#include <cstdlib>
#include <string>

#include "planner/measured/link_fit_file.h"
#include "runtime/base/rank_name.h"
#include "runtime/base/status.h"
#include "runtime/comm/rounds/link_fit.h"

namespace tessera {
namespace {

constexpr char kWantedKey[] = "network_fit", kCostsKey[] = "network_fit/costs", kFailedKey[] = "network_fit/failed";

bool is_file(const CommConfig& comm) {
  return !comm.network_fit.empty() && comm.network_fit != CommConfig::kMeasuredNetwork &&
         comm.network_fit != CommConfig::kDirectNetwork;
}

/// Publishes the result of rank 0's read: the costs as JSON and the code 0, or an error's message and its exit code.
absl::Status publish(const std::string& path, KeyValueStore& store) {
  const absl::StatusOr<LinkFit> fit = read_link_fit(path);
  const int code = fit.ok() ? 0 : static_cast<int>(exit_code_of(fit.status()));
  TESSERA_RETURN_IF_ERROR(store.set(kCostsKey, fit.ok() ? to_json(*fit) : message_of(fit.status())));
  return store.set(kFailedKey, std::to_string(code));
}

}  // namespace

NetworkChoice::NetworkChoice(const CommConfig& comm)
    : comm_(comm), by_(is_file(comm) ? std::make_shared<ChooseAlgorithm>() : nullptr) {}

ChooseAlgorithm NetworkChoice::choose() const {
  if (!by_) return nullptr;
  return [by = by_](Operation operation, int ranks, DType dtype, std::size_t bytes) {
    return *by ? (*by)(operation, ranks, dtype, bytes) : Algorithm::kDirect;
  };
}

absl::Status NetworkChoice::agree(const Topology& topology, KeyValueStore& store) {
  if (topology.world_size == 1) return absl::OkStatus();
  const std::string own = '"' + comm_.network_fit + '"';
  const std::chrono::milliseconds timeout(static_cast<std::int64_t>(comm_.init_timeout_s * 1000));
  if (topology.rank == 0) {
    TESSERA_RETURN_IF_ERROR(store.set(kWantedKey, own));
    if (by_) TESSERA_RETURN_IF_ERROR(publish(comm_.network_fit, store));
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string wanted, store.get(kWantedKey, timeout));
  if (wanted != own)
    return make_error(ExitCode::kConfig, rank_name(topology.rank, topology.world_size) + ": comm.network_fit is " +
                                             own + " here, and " + wanted +
                                             " on rank 0. [T0249] hint: start all ranks with one strategy");
  if (!by_) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::string failed, store.get(kFailedKey, timeout));
  TESSERA_ASSIGN_OR_RETURN(const std::string costs, store.get(kCostsKey, timeout));
  if (const int code = std::atoi(failed.c_str()); code != 0) return make_error(static_cast<ExitCode>(code), costs);
  TESSERA_ASSIGN_OR_RETURN(const LinkFit fit, parse_link_fit(costs, "rank 0's comm.network_fit"));
  *by_ = choose_by(fit);
  return absl::OkStatus();
}

}  // namespace tessera
