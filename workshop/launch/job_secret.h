#pragma once

#include <absl/status/statusor.h>

#include <string>

namespace tessera {

/// Returns a new secret: 128 random bits as 32 hexadecimal digits. Error 71 if the system has no random bytes.
absl::StatusOr<std::string> random_secret();

/// Returns the secret that the processes of a job with parameter servers send to each other (TESSERA_SERVERS_SECRET).
/// It is the secret in `file`, if a file is named; else the secret in the environment; else a new one. If `makes_file`,
/// a missing file is created with a new secret, readable only by this user. A file's last line end does not count.
///
/// Errors: 66 if the file is missing, 77 if other users may read or write it, 65 if it is no regular file or does not
/// hold a secret of 16 to 256 bytes, 73 if it cannot be created.
absl::StatusOr<std::string> job_secret(const std::string& file, bool makes_file);

}  // namespace tessera
