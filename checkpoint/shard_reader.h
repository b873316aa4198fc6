#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files/regular_file.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"

namespace tessera {

/// Reads one file of a checkpoint, which may be damaged or hostile: bytes are returned only if they have the hash in
/// the manifest. Only a regular file with that name in that folder is opened; links are not followed. One thread at a
/// time uses it.
///
/// Messages begin with `who` and the file. Errors: 66 if the file is missing; 77 without permission; 71 without free
/// descriptors or memory; 65 if the size or a hash differs from the manifest (the message has the offset, both hashes
/// and the pieces at this offset); 74 if a read fails.
class ShardReader {
 public:
  /// A function that describes the content of the bytes [begin, end) of the data, for messages.
  using Describe = std::function<std::string(std::int64_t begin, std::int64_t end)>;

  /// `file` must outlive this object.
  ShardReader(std::string folder, const SavedFile& file, std::string who);

  /// Reads the head and checks it.
  absl::StatusOr<ShardHeader> read_header();
  /// Reads a chunk of the data into `bytes` [chunk_bytes(chunk)], and checks it. The bytes of a damaged chunk are
  /// written to `bytes` too. `describe` is called if the chunk is damaged. Reading is fastest in the order of the file.
  absl::Status read_chunk(std::int64_t chunk, std::span<std::byte> bytes, const Describe& describe);
  /// Returns the bytes of a chunk; the last chunk may be shorter than SavedFile::kChunkBytes.
  std::size_t chunk_bytes(std::int64_t chunk) const;
  /// Checks a chunk without returning its bytes.
  absl::Status verify_chunk(std::int64_t chunk, const Describe& describe);
  const std::string& path() const { return path_; }

 private:
  struct Range {
    std::int64_t begin = 0, end = 0;  ///< range of the data in the file, in bytes
  };

  absl::Status open();
  absl::Status read(std::int64_t offset, std::span<std::byte> bytes);
  Range range_of(std::int64_t chunk) const;
  /// Reads a chunk block by block into the memory that `memory(offset, bytes)` returns for an offset in the chunk, and
  /// compares its hash.
  template <class Memory>
  absl::Status read_blocks(std::int64_t chunk, const Memory& memory, const Describe& describe);
  absl::Status check(std::int64_t chunk, std::uint64_t hash, const Describe& describe) const;

  const std::string path_, who_;
  const SavedFile& file_;
  std::optional<RegularFile> opened_;
  std::vector<std::byte> block_;
};

}  // namespace tessera
