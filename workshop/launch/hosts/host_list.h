#pragma once

// See docs/glossary.md: slot.

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A host of a job. `tessera launch --hosts` and host files name such hosts.
struct HostSlots {
  std::string name;  ///< the name as ssh takes it: a name or an address, perhaps behind "user@"
  int slots = 1;     ///< ranks that start on this host

  bool operator==(const HostSlots&) const = default;
};

constexpr int kMostSlots = 1024;  ///< ranks of one host; a larger number is a typing error

/// Reads the text of --hosts: "a:2,b:2". A host without a number has one slot. An IPv6 address stands in brackets:
/// "[fd00::1]:2". Errors name the column: 64 for an empty name, a character that no name has, a number of slots outside
/// of 1 to 1024, and a host that was named before.
absl::StatusOr<std::vector<HostSlots>> parse_hosts(std::string_view text);

/// Reads a host file: one host a line, as "a slots=2", "a:2" or "a". Text behind a "#" is a comment. Errors: 66 and 77
/// for a file that cannot be read; 78 for its content, naming line and column; 78 for a file without a host.
absl::StatusOr<std::vector<HostSlots>> read_hostfile(const std::string& path);

/// Returns the name without "user@", as a resolver takes it.
std::string address_of(const HostSlots& host);

}  // namespace tessera
