#pragma once

#include <absl/status/statusor.h>

#include <string>

namespace tessera {

/// Returns a new secret: 128 random bits as 32 hexadecimal digits. Error 71 where the system has no random bytes.
absl::StatusOr<std::string> random_secret();

/// Returns the secret that the processes of a job with parameter servers say to each other (TESSERA_SERVERS_SECRET):
/// that of `file`, if it is named; else that of the environment; else a new one. If `makes_file`, a missing file is
/// made with a new secret, for this user alone. A file's last line end does not count.
///
/// Errors: 66 for a missing file, 77 for one that other users may read or write, 65 for one that is no regular file or
/// longer than a secret may be, 73 where it cannot be made.
absl::StatusOr<std::string> job_secret(const std::string& file, bool makes_file);

}  // namespace tessera
