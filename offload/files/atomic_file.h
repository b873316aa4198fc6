#pragma once

#include <absl/status/status.h>
#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

namespace tessera {

/// Writes `bytes` into the file `path` atomically. The name always stands for the whole old file (or none) or for the
/// whole new one, even after errors, kill -9 or a power loss. It writes, syncs and renames a temporary file in the same
/// folder, PATH.tmp-PID-NUMBER, and syncs the folder.
///
/// * On an error the old file is as it was, and the temporary file is gone. There is one exception: if only the sync of
///   the folder failed, the whole new file is there, but after a power loss it might be the old one again.
/// * A sync that failed is not tried again: the kernel may have dropped the data it could not write, and would then say
///   that all is well.
/// * Only a kill or a power loss leaves a temporary file behind. No program reads such a file.
/// * A link at `path` is replaced by the file, not followed. The new file has `mode`, whatever the old one had.
///
/// Any thread may call it; if two calls for one path run at once, one of them wins.
/// Errors, with `who` in front: 73 the folder is missing, no folder or read-only, or `path` is a folder; 77 no
/// permission; 71 too many open files; 74 a full disk (with bytes wanted and free), a failed write or sync; 78 an empty
/// path.
absl::Status write_file_atomically(const std::string& path, std::span<const std::byte> bytes, const std::string& who,
                                   mode_t mode = 0600);

/// Makes the folder and those above it that are missing. Syncs the folder above each new one, so that a later power
/// loss removes none of them. Errors, with `who` in front: 73 a folder cannot be created; 77 no permission; 71 too many
/// open files; 74 a full disk or a failed sync.
absl::Status make_folders(const std::string& folder, const std::string& who);

}  // namespace tessera
