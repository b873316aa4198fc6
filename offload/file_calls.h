#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace tessera::file_calls {

/// The calls of the operating system that change files, each behind a site of the FaultPlan. They return what the call
/// does, or a negative errno as io_uring does; errno itself is not set. EINTR is returned too: the caller retries.
/// `name` is the file's in messages and in rules.

int open(const std::string& name, int flags, mode_t mode);
/// A new file in `directory` that has no name (O_TMPFILE); `name` is made up.
int open_unnamed(const std::string& directory, const std::string& name, mode_t mode);
/// A second description of an open file, which may have no name.
int open_again(int fd, const std::string& name, int flags);
ssize_t pread(int fd, const std::string& name, void* data, std::size_t bytes, off_t offset);
ssize_t pwrite(int fd, const std::string& name, const void* data, std::size_t bytes, off_t offset);
/// Makes room on the disk for [0, bytes).
int reserve(int fd, const std::string& name, off_t bytes);
int fsync(int fd, const std::string& name);
/// Syncs a folder: names that were made or changed in it are durable afterwards.
int fsync_folder(int fd, const std::string& folder);
int rename(const std::string& from, const std::string& to);
int unlink(const std::string& name);
int make_folder(const std::string& name, mode_t mode);
/// Of an empty folder.
int remove_folder(const std::string& name);

}  // namespace tessera::file_calls
