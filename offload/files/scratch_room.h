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

/// Space on the disk in one directory, for pieces of any size, where the total is not known in advance. The space lies
/// in scratch files, which are added as the need grows, and stay until the object is destroyed.
///
/// A new file is as large as a quarter of all files before it, and no smaller than `least_growth` and the piece that it
/// is for. Its space on the disk is taken at once. Pieces are put where room is free, from the beginning of the oldest
/// file on, so pieces that come and go like a stack use the same space again and again. One thread at a time may use
/// it.
class ScratchRoom {
 public:
  /// `file`: the options that all files have in common; its `bytes` are ignored. `least_growth`: a multiple of 4096,
  /// more than 0.
  ScratchRoom(BlockFileOptions file, std::int64_t least_growth) : options_(std::move(file)), growth_(least_growth) {}
  ScratchRoom(ScratchRoom&&) = default;

  /// Takes room. `bytes`: a multiple of 4096, more than 0. Errors: those of BlockFile::create, such as a full disk.
  absl::StatusOr<Room> take(std::size_t bytes);
  /// Frees space that `take` gave out. REQUIRES: `holds(room)`; nothing reads or writes it any more.
  void give_back(const Room& room);
  /// Returns whether `take` of this object gave the room out.
  bool holds(const Room& room) const { return number_of(room) < files_.size(); }

  std::int64_t file_bytes() const { return file_bytes_; }
  std::int64_t taken_bytes() const { return taken_bytes_; }

 private:
  using Place = std::pair<std::size_t, std::int64_t>;  ///< number of a file, offset in it

  absl::Status grow(std::size_t bytes);
  std::size_t number_of(const Room& room) const;

  BlockFileOptions options_;
  std::int64_t growth_;
  std::vector<std::unique_ptr<BlockFile>> files_;
  std::map<Place, std::int64_t> free_;  ///< bytes of each free range; no two of them touch
  std::int64_t file_bytes_ = 0, taken_bytes_ = 0;
};

}  // namespace tessera
