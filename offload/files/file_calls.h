#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "offload/files/file_place.h"

namespace tessera::file_calls {

/// The calls of the operating system for files, each with a site of the FaultPlan. They return the result of the
/// operating system's call, or a negative errno as io_uring does; errno itself is not set. EINTR is returned too, so
/// the caller must retry. `name` is the file's name in messages and rules. Any thread may call them.
///
/// Functions that take a FilePlace follow no link below the user's folder, and return -ELOOP if they meet one. An
/// exception is the file itself in `rename` and `unlink`: a link there is renamed, replaced or removed.

int open(const FilePlace& file, int flags, mode_t mode);
/// Opens a new file in `directory` that has no name (O_TMPFILE); `name` is a made-up name for messages.
int open_unnamed(const std::string& directory, const std::string& name, mode_t mode);
/// Opens an open file a second time; the file need not have a name.
int open_again(int fd, const std::string& name, int flags);
ssize_t pread(int fd, const std::string& name, void* data, std::size_t bytes, off_t offset);
ssize_t pwrite(int fd, const std::string& name, const void* data, std::size_t bytes, off_t offset);
/// Repeats pwrite until all bytes are written. Returns 0, or a negative errno after a failure. It repeats calls that
/// were interrupted, that failed with EAGAIN or that wrote nothing, at most kMostRetries times in a row. After that it
/// returns the last error, or -EIO if the last call wrote nothing. `done` is set to the number of bytes written.
int write_all(int fd, const std::string& name, std::span<const std::byte> bytes, off_t offset, std::size_t& done);
/// Reserves space on the disk for the bytes [0, bytes) of the file.
int reserve(int fd, const std::string& name, off_t bytes);
int fsync(int fd, const std::string& name);
/// Syncs a folder. Afterwards, names that were made or changed in the folder are durable.
int fsync_folder(int fd, const std::string& folder);
/// Opens, syncs and closes the folder of a file. `operation` is set to the name of the call that failed, for messages.
int sync_folder_of(const FilePlace& file, const char*& operation);
int rename(const FilePlace& from, const FilePlace& to);
int unlink(const FilePlace& file);
/// Removes a file like `unlink`, but passes no site. It is for a file that must be removed although `unlink` failed.
int unlink_surely(const FilePlace& file);
int make_folder(const FilePlace& folder, mode_t mode);
/// Removes an empty folder.
int remove_folder(const FilePlace& folder);
/// Adds the names of the files and folders in a folder to `names`. It has no site.
int list_folder(const FilePlace& folder, std::vector<std::string>& names);
/// Returns 0 if `folder` is a folder, and not a link to one. It has no site.
int check_folder(const FilePlace& folder);

}  // namespace tessera::file_calls
