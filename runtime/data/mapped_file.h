#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <filesystem>
#include <span>

namespace tessera {

/// A regular file, mapped read-only and private. It owns the mapping and nothing else: the descriptor is closed, so any
/// number of files can be open. It is move-only.
///
/// Its size is the size of the file when it was opened. If a file is cut short while it is mapped, the next read beyond
/// its end kills the process with SIGBUS, as with every mapped file. Growing the file changes nothing.
class MappedFile {
 public:
  /// Errors: 66 if the file is missing, 77 if permission is missing, 65 if it is not a regular file (a pipe or a device
  /// could block or never end), 71 if memory or mappings ran out, 74 for everything else.
  static absl::StatusOr<MappedFile> open(const std::filesystem::path& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::size_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile() = default;

  std::filesystem::path path_;
  const std::byte* data_ = nullptr;  ///< nullptr if the file is empty
  std::size_t size_ = 0;
};

}  // namespace tessera
