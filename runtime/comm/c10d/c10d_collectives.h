#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Returns collectives over a c10d::Backend that can all-gather, broadcast and exchange CPU tensors: `gloo`, `mpi`, or
/// a user's own backend. gloo_collectives, mpi_collectives and backend groups call this function when a group is made.
///
/// Tessera makes the sums itself, so that they have the bits that rule 3 in collectives.h demands. The ranks exchange
/// the parts in the wire's dtype and add them in fp32. An all_reduce is such a sum, which is then gathered. Up to 64
/// KiB, every rank gathers and adds everything itself.
///
/// all_gather, broadcast, all_to_all and barrier run in the backend's threads until the caller waits for them. The
/// pieces of reductions with Waits::kLater are sent, added and gathered by a thread of the group
/// (reducing_in_background). Other reductions, and all reductions of a user's own backend, are done when the call
/// returns. Dropping a Work waits for its call.
///
/// `choose`, unless it is null, chooses the algorithm of each call over Gloo or MPI. Calls for which `choose` does not
/// decide use kDirect. These are compressed reductions, broadcasts (the library's own broadcast is a tree),
/// all-to-alls, and all calls of a user's own backend. An all_gather in rounds, or with a codec, is made by a thread of
/// the group after earlier gathers. A user's own backend makes a gather with a codec at once, and the gather is done
/// when the call returns. Reductions are split into pieces of 2 MiB of input.
///
/// The error of a failed backend seldom names the cause. If a call fails, every rank therefore writes its last call to
/// `store` and reads the calls of the other ranks. The message names the call of each rank, and the ranks that do not
/// answer. The backend is then dropped, which closes its connections and makes the peers fail too.
std::shared_ptr<Collectives> c10d_collectives(const Group& group, TransportKind kind,
                                              c10::intrusive_ptr<c10d::Backend> backend,
                                              std::shared_ptr<KeyValueStore> store, ChooseAlgorithm choose = nullptr);

}  // namespace tessera
