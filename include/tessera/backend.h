#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/init.h"

namespace tessera {

/// One group of ranks that a backend is to connect.
struct BackendRequest {
  std::string name;                       ///< unique in the job together with the ranks
  int rank = 0;                           ///< this rank's place in `world_ranks`
  std::vector<int> world_ranks;           ///< ascending
  c10::intrusive_ptr<c10d::Store> store;  ///< for the group's rendezvous; its keys are the group's own
  std::chrono::milliseconds timeout;      ///< of meeting: comm.init_timeout_s
};

/// Connects one group. Called on every member at the same time. May throw.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

/// As `init`, but all groups of more than one rank communicate through a backend of the user's own. It must accept CPU
/// tensors in any memory.
///
/// The backend needs these calls on uint8 tensors: `all_gather_single`, `all_to_all_single` (equal parts), `broadcast` and
/// `barrier`; and `getBackendName`, which messages show. Before LibTorch 2.14 the first two have the names `_allgather_base` and
/// `alltoall_base`; since then a backend may override either name. All calls are made by the thread that calls the
/// Engine. Tessera itself makes the sums, from parts that were exchanged, so
/// results have the same bits as on every other transport. A call that fails or times out must throw, either from the
/// call or from Work::wait.
///
/// Errors: those of `init`; 78 if comm.transport names another transport; 75 if `make` throws.
Mesh init(const CommConfig& comm, const MakeBackend& make);

}  // namespace tessera
