#pragma once

#include <absl/status/statusor.h>

#include <string>

#include "runtime/comm/key_value_store.h"
#include "runtime/comm/rounds/algorithm.h"
#include "tessera/topology.h"

namespace tessera {

/// Names the file of a LinkFit (sharding/timing/link_fit_file.h), by which calls over gloo choose their algorithms. Set on all ranks, to
/// files that say the same, or on none: then all calls go directly.
inline constexpr const char* kNetworkFitVariable = "TESSERA_NETWORK_FIT";

/// What a rank has read.
struct NetworkChoice {
  ChooseAlgorithm choose;  ///< null where kNetworkFitVariable is not set
  std::string fit;         ///< as JSON; empty likewise
};
/// Reads the file that kNetworkFitVariable names. Errors: those of read_link_fit.
absl::StatusOr<NetworkChoice> choice_of_environment();

/// Collective over the ranks that have a choice, before they make groups: OK where all ranks of the world have the same. Otherwise 78
/// (rank 0 waits `timeout_s` for the others, and they for it).
absl::Status agree_on_choice(const NetworkChoice& own, const Topology& topology, KeyValueStore& store,
                             double timeout_s);

}  // namespace tessera
