#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <vector>

#include "workshop/launch/hosts/host_list.h"

namespace tessera {

/// These find out where ranks of several hosts meet: the first host, and the address by which the others reach it.

/// Checks that the job's first host is this machine, which starts its ranks without ssh: "localhost", this machine's
/// name, or a name that resolves to one of its addresses. It fails with error 64 for any other host.
absl::Status check_first_host(const HostSlots& first);

/// Returns the address at which the ranks of all hosts reach rank 0, as a number. It is the address behind the first
/// host's name, unless that is a loopback address. Else it is the address of this machine from which the way to the
/// next host starts. It fails with error 64 if there is no such address. Names that only ssh knows resolve to nothing
/// here.
/// REQUIRES: two hosts or more.
absl::StatusOr<std::string> job_address(const std::vector<HostSlots>& hosts);

}  // namespace tessera
