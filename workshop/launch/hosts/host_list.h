#pragma once

// See docs/glossary.md: slot.

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A host of a job. `tessera launch --hosts` and host files name such hosts.
struct HostSlots {
  std::string name;  ///< name or address as ssh takes it, perhaps after "user@"
  int slots = 1;     ///< ranks that start on this host

  bool operator==(const HostSlots&) const = default;
};

constexpr int kMostSlots = 1024;  ///< largest number of ranks on one host; a larger number is a typing error

/// Reads the text of --hosts: "a:2,b:2". A host without a number has one slot. An IPv6 address stands in brackets:
/// "[fd00::1]:2". Errors name the column: 64 if a name is empty or has a character that no name may have, if a number
/// of slots is not from 1 to 1024, or if a host was named before.
absl::StatusOr<std::vector<HostSlots>> parse_hosts(std::string_view text);

/// Reads a host file with one host per line, as "a slots=2", "a:2" or "a". The text after a "#" is a comment. Errors:
/// those of read_input_file; 78 if its content is wrong, naming line and column, if it has no host, or if it is larger
/// than 1 MiB.
absl::StatusOr<std::vector<HostSlots>> read_hostfile(const std::string& path);

/// Returns the name without "user@", as a resolver takes it.
std::string address_of(const HostSlots& host);

}  // namespace tessera
