#pragma once

#include <absl/status/status.h>
#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "offload/files/file_place.h"

namespace tessera {

/// Writes `bytes` into a file atomically. Even after errors, kill -9 or a power loss, its path has the whole new file
/// or the whole old file, or no file if there was none before. The function writes, syncs and renames a temporary file
/// in the same folder, PATH.tmp-PID-NUMBER, and syncs the folder.
///
/// * After an error the old file is unchanged, and the temporary file is removed. There is one exception. If only the
///   sync of the folder failed, the path has the whole new file, but after a power loss it might have the old file
///   again.
/// * A sync that failed is not tried again: the kernel may have dropped the data that it could not write, and would
///   then report success.
/// * Only a kill or a power loss leaves a temporary file behind. No program reads such a file.
/// * A link at the path is replaced by the file, not followed. The new file has `mode`, whatever the old one had.
///
/// Any thread may call it; if two calls for one path run at once, the file of one of them remains. Messages begin with
/// `who`. Errors: 73 if the folder is missing, is not a folder or is read-only, or if the path is a folder; 77 without
/// permission; 71 if too many files are open; 74 if the disk is full (the message has the bytes wanted and free), or if
/// a write or sync fails; 78 if the path is empty.
absl::Status write_file_atomically(const FilePlace& file, std::span<const std::byte> bytes, const std::string& who,
                                   mode_t mode = 0600);

/// Makes the folder, and the folders above it that are missing. Syncs the folder above each new folder, so that a later
/// power loss removes none of them. Messages begin with `who`. Errors: 73 if a folder cannot be created; 77 without
/// permission; 71 if too many files are open; 74 if the disk is full or a sync fails.
absl::Status make_folders(const std::string& folder, const std::string& who);

}  // namespace tessera
