#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "offload/io/io_ring.h"

namespace tessera {

/// An empty folder under the current one, which is on a disk. The destructor removes it.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  /// Returns the names of the entries in the folder, sorted.
  std::vector<std::string> names() const;

 private:
  std::string path_;
};

/// Lowers the limit of descriptors, as long as it exists, so that this process can open `more` more files.
class FewDescriptors {
 public:
  explicit FewDescriptors(int more);
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_{};
};

/// The end of a forked child, and the text that it wrote to stderr.
struct ChildEnd {
  int exit_code = -1;
  int signal = 0;
  std::string text;
};
/// Runs `body` in a child process. The child's exit code is the result of `body`.
ChildEnd in_child(const std::function<int()>& body);

/// Functions that bodies of children call before they do anything else. They return false if the system refuses the
/// call.
bool enter_own_mounts();                                           ///< enters a private mount namespace
bool mount_tmpfs(const std::string& at, const std::string& size);  ///< mounts memory in that namespace
bool forbid_io_uring(int error);                ///< lets io_uring_setup fail with that errno (seccomp)
bool lower_locked_memory(std::uint64_t bytes);  ///< lowers RLIMIT_MEMLOCK, and drops the right to exceed it
bool become_nobody();

/// Fills memory with bytes that depend only on the seed. Other seeds give other bytes.
void fill_pattern(std::span<std::byte> memory, std::uint64_t seed);
std::uint64_t hash_of(std::span<const std::byte> memory);

/// One way in which requests are made: an implementation of the ring, with direct transfers or through the page cache.
struct IoVariant {
  std::string name;
  IoRingOptions ring;
  bool direct = true;
};
std::vector<IoVariant> io_variants();

}  // namespace tessera
