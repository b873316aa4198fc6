#include "offload/files/scratch_room.h"

#include <algorithm>
#include <iterator>

#include "offload/files/sector.h"
#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<Room> ScratchRoom::take(std::size_t bytes) {
  const auto wanted = static_cast<std::int64_t>(bytes);
  const auto fits = [wanted](const auto& stretch) { return stretch.second >= wanted; };
  auto found = std::ranges::find_if(free_, fits);
  if (found == free_.end()) {
    TESSERA_RETURN_IF_ERROR(grow(bytes));
    found = std::ranges::find_if(free_, fits);
  }
  const auto [file, offset] = found->first;
  const std::int64_t rest = found->second - wanted;
  free_.erase(found);
  if (rest > 0) free_[{file, offset + wanted}] = rest;
  taken_bytes_ += wanted;
  return Room{files_[file].get(), offset, bytes};
}

absl::Status ScratchRoom::grow(std::size_t bytes) {
  BlockFileOptions options = options_;
  const auto quarter = static_cast<std::int64_t>(whole_sectors(static_cast<std::size_t>(file_bytes_ / 4)));
  options.bytes = std::max({static_cast<std::int64_t>(bytes), growth_, quarter});
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<BlockFile> file, BlockFile::create(options));
  free_[{files_.size(), 0}] = options.bytes;
  file_bytes_ += options.bytes;
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

/// Returns the index of the file that contains the room; if no file contains it, returns the number of files.
std::size_t ScratchRoom::number_of(const Room& room) const {
  const auto is_it = [&](const std::unique_ptr<BlockFile>& file) { return file.get() == room.file; };
  return static_cast<std::size_t>(std::ranges::find_if(files_, is_it) - files_.begin());
}

void ScratchRoom::give_back(const Room& room) {
  const std::size_t file = number_of(room);
  taken_bytes_ -= static_cast<std::int64_t>(room.bytes);
  const Place begin{file, room.offset};
  auto bytes = static_cast<std::int64_t>(room.bytes);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == Place{file, room.offset + bytes}) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first.first == file && before->first.second + before->second == room.offset) {
      before->second += bytes;
      return;
    }
  }
  free_[begin] = bytes;
}

}  // namespace tessera
