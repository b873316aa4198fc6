#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "offload/files/block_file.h"

namespace tessera {

/// A range of bytes in a scratch file.
struct Room {
  const BlockFile* file = nullptr;
  std::int64_t offset = 0;  ///< a multiple of 4096
  std::size_t bytes = 0;    ///< a multiple of 4096
};

/// Space on the disk, in one directory, for pieces of any size whose total is not known in advance. The space is in
/// scratch files. Files are added when more space is needed, and stay until this object is destroyed.
///
/// A new file is at least as large as a quarter of all previous files together, as `least_growth`, and as the piece
/// that needs it. Its space on the disk is reserved at once. Pieces are placed in free space, which is searched from
/// the beginning of the oldest file. So pieces that are added and removed like a stack use the same space again and
/// again. One thread at a time may use this object.
class ScratchRoom {
 public:
  /// `file`: the options of all files; its `bytes` are ignored. `least_growth`: a multiple of 4096, more than 0.
  ScratchRoom(BlockFileOptions file, std::int64_t least_growth) : options_(std::move(file)), growth_(least_growth) {}
  ScratchRoom(ScratchRoom&&) = default;

  /// Reserves a range of `bytes` bytes, a multiple of 4096 above 0. Errors: those of BlockFile::create, such as a full
  /// disk.
  absl::StatusOr<Room> take(std::size_t bytes);
  /// Frees a range that `take` returned. REQUIRES: `holds(room)`, and no read or write of the range is under way.
  void give_back(const Room& room);
  /// Returns whether the range lies in a file of this object.
  bool holds(const Room& room) const { return number_of(room) < files_.size(); }

  std::int64_t file_bytes() const { return file_bytes_; }
  std::int64_t taken_bytes() const { return taken_bytes_; }

 private:
  using Place = std::pair<std::size_t, std::int64_t>;  ///< index of a file, and an offset in that file

  absl::Status grow(std::size_t bytes);
  std::size_t number_of(const Room& room) const;

  BlockFileOptions options_;
  std::int64_t growth_;
  std::vector<std::unique_ptr<BlockFile>> files_;
  std::map<Place, std::int64_t> free_;  ///< number of bytes of each free range; no two free ranges touch
  std::int64_t file_bytes_ = 0, taken_bytes_ = 0;
};

}  // namespace tessera
