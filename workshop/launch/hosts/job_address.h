#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <vector>

#include "workshop/launch/hosts/host_list.h"

namespace tessera {

/// These functions find the address at which the ranks of several hosts meet: an address of the first host that the
/// other hosts can reach.

/// Checks that the job's first host is this machine, on which ranks start without ssh: "localhost", this machine's
/// name, or a name that resolves to one of its addresses. The function fails with error 64 if the host is another
/// machine.
absl::Status check_first_host(const HostSlots& first);

/// Returns the address at which the ranks of all hosts reach rank 0, in numeric form. The first host's name may have
/// several addresses. The result is the first of them that this machine has and that is not a loopback address. If
/// there is none, the result is the address of this machine from which packets to another host are sent. The function
/// fails with error 64 if no address is found. A name that only ssh's configuration defines has no address here.
/// REQUIRES: two hosts or more.
absl::StatusOr<std::string> job_address(const std::vector<HostSlots>& hosts);

}  // namespace tessera
