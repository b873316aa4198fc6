#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/init.h"

namespace tessera {

/// One group of ranks that a backend is to connect. Tessera fills it in and hands it to MakeBackend.
struct BackendRequest {
  std::string name;                       ///< name of the group; together with the ranks it is unique in the job
  int rank = 0;                           ///< index of this rank in `world_ranks`
  std::vector<int> world_ranks;           ///< ranks of the job that belong to the group, ascending
  c10::intrusive_ptr<c10d::Store> store;  ///< store for the group's rendezvous; no other group sees its keys
  std::chrono::milliseconds timeout;      ///< limit of the rendezvous: comm.init_timeout_s
};

/// Connects one group and returns its backend. Every member of the group calls the function at the same time. The
/// function may throw.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

/// Joins this process to its job as `init` (tessera/init.h) does, but all groups of more than one rank communicate
/// through a backend that the program provides. The backend must accept CPU tensors in any memory. Call this function
/// once, before any Engine, on every rank.
///
/// The backend needs these calls on uint8 tensors: `all_gather_single`, `all_to_all_single` (equal parts), `broadcast`
/// and `barrier`. The backend also needs `getBackendName`, whose result appears in messages. LibTorch before 2.14 has
/// the names `_allgather_base` and `alltoall_base` for the first two; since 2.14 a backend may override either name.
/// The thread that calls the Engine makes all calls. Tessera itself makes the sums, from parts that were exchanged, so
/// results have the same bits as on every other transport. A call that fails or times out must throw, either from the
/// call or from Work::wait.
///
/// Errors (tessera::Error): those of `init`; 78 if comm.transport names another transport; 75 if `make` throws.
Mesh init(const CommConfig& comm, const MakeBackend& make);

}  // namespace tessera
