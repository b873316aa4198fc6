#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Makes this rank's side of a group with the `gloo` transport: CPU ranks on any hosts, over TCP
/// (c10d::ProcessGroupGloo). `address` is the address of this host by which the other ranks reach it; see
/// `address_towards`. GLOO_SOCKET_IFNAME, if set, names an interface whose address is used in place of `address`.
/// `choose` has the same meaning as in c10d_collectives. The call is collective over the group. Error: 75 if the ranks
/// cannot connect within `group.init_timeout_s`.
absl::StatusOr<std::shared_ptr<Collectives>> gloo_collectives(const Group& group, const std::string& address,
                                                              std::shared_ptr<C10dStore> store,
                                                              ChooseAlgorithm choose = nullptr);

/// Returns the address of this host from which `host` is reached; nothing is sent. Errors: 75 if `host` is not known
/// within `timeout_s`; 78 if `host` is another machine's name but leads back to this machine by loopback.
absl::StatusOr<std::string> address_towards(const std::string& host, double timeout_s);

}  // namespace tessera
