#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Collectives over any c10d::Backend of CPU tensors that can all-gather, broadcast and exchange: `gloo`, or
/// a user's own.
///
/// Sums are ours, so that they have the bits of rule 3: the parts are exchanged in the dtype of the wire and
/// added here, in fp32. all_reduce is such a sum, gathered again; up to 64 KiB, every rank gathers and adds
/// everything itself.
///
/// all_gather, broadcast, all_to_all and barrier run in the backend's threads until waited for; so do reductions with
/// Waits::kLater, whose pieces are sent, added and gathered by a thread of the group (reducing_in_background), while others,
/// and all of a user's own backend, are done when they return. A Work that is dropped waits.
///
/// `choose`, where it is not null, says of each call over Gloo how it goes over the network; what it does not say of goes directly:
/// reductions that are compressed, broadcasts (Gloo's own is a binomial tree), all-to-alls, and all calls of a user's own backend. An
/// all_gather that `choose` gave rounds is made by a thread of the group, after those before it; reductions in pieces of 2 MiB of input.
///
/// A failed backend says little, so on failure every rank writes its last call to `store` and reads the
/// others': the message tells what each was doing and who does not answer. Then the backend is dropped, which
/// closes its connections and makes the peers fail too.
std::shared_ptr<Collectives> c10d_collectives(const Group& group, TransportKind kind,
                                              c10::intrusive_ptr<c10d::Backend> backend,
                                              std::shared_ptr<KeyValueStore> store, ChooseAlgorithm choose = nullptr);

}  // namespace tessera
