#include "checkpoint/shard_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "checkpoint/files/hash.h"
#include "checkpoint/files/regular_file.h"
#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<ShardWriter>> ShardWriter::create(const std::string& folder, const std::string& name,
                                                                 const ShardHeader& header, const std::string& who) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  std::unique_ptr<ShardWriter> writer(new ShardWriter(folder + "/" + name, who));
  const FilePlace file = in_checkpoint(writer->path_);
  const int got = retried([&] { return file_calls::open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600); });
  if (got < 0) return writer->error("create", -got);
  writer->fd_ = got;
  const std::string head = write_header(header);
  writer->wanted_ = header.data_bytes();
  writer->file_.name = name;
  writer->file_.header_bytes = static_cast<std::int64_t>(head.size());
  writer->file_.header_hash = checkpoint_hash(head);
  TESSERA_RETURN_IF_ERROR(writer->take_blocks());
  TESSERA_RETURN_IF_ERROR(writer->write(std::as_bytes(std::span(head)), 0));
  writer->file_bytes_ = writer->in_writeback_ = writer->file_.header_bytes;
  writer->set_direct(writer->wanted_ >= kBlockBytes);
  return writer;
}

ShardWriter::~ShardWriter() {
  if (under_way_.valid()) under_way_.wait();
  if (fd_ >= 0) ::close(fd_);
}

absl::Status ShardWriter::error(const char* operation, int error, std::int64_t offset, std::int64_t wanted,
                                std::int64_t got) const {
  return file_error({.who = who_,
                     .operation = operation,
                     .file = path_,
                     .folder = std::filesystem::path(path_).parent_path().string(),
                     .offset = offset,
                     .wanted = wanted,
                     .got = got,
                     .error = error});
}

/// Allocates the blocks: a smaller block for little data, and a second block only if there is data to fill it.
absl::Status ShardWriter::take_blocks() {
  const auto bytes = static_cast<std::size_t>(std::min(kBlockBytes, wanted_));
  TESSERA_ASSIGN_OR_RETURN(blocks_[0], AlignedMemory::make(bytes, who_));
  if (wanted_ <= kBlockBytes) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(blocks_[1], AlignedMemory::make(bytes, who_));
  return absl::OkStatus();
}

absl::Status ShardWriter::append(std::span<const std::byte> data) {
  appended_ += static_cast<std::int64_t>(data.size());
  if (appended_ > wanted_) return other_size();
  while (!data.empty()) {
    const std::size_t chunk_end = hashed_ + static_cast<std::size_t>(SavedFile::kChunkBytes);
    const auto next = data.first(std::min(chunk_end - filled_, data.size()));
    std::memcpy(blocks_[block_].data() + filled_, next.data(), next.size());
    filled_ += next.size();
    data = data.subspan(next.size());
    if (filled_ == chunk_end) hash_chunk();
    if (filled_ == static_cast<std::size_t>(kBlockBytes)) TESSERA_RETURN_IF_ERROR(hand_over_block());
  }
  return absl::OkStatus();
}

void ShardWriter::hash_chunk() {
  file_.chunk_hashes.push_back(checkpoint_hash(blocks_[block_].span().subspan(hashed_, filled_ - hashed_)));
  hashed_ = filled_;
}

/// Begins to write the full block. Meanwhile the other block is filled.
absl::Status ShardWriter::hand_over_block() {
  TESSERA_RETURN_IF_ERROR(end_write());
  const auto bytes = std::span<const std::byte>(blocks_[block_].span()).first(filled_);
  const std::int64_t offset = std::exchange(file_bytes_, file_bytes_ + kBlockBytes);
  block_ = 1 - block_;
  filled_ = hashed_ = 0;
  try {
    under_way_ = std::async(std::launch::async, [this, bytes, offset] { return write(bytes, offset); });
  } catch (const std::system_error&) {  // the system has no more threads
    return write(bytes, offset);
  }
  return absl::OkStatus();
}

absl::Status ShardWriter::end_write() { return under_way_.valid() ? under_way_.get() : absl::OkStatus(); }

/// Turns O_DIRECT on or off. If the file system does not support it, the file is written through the page cache.
void ShardWriter::set_direct(bool direct) {
  const int flags = ::fcntl(fd_, F_GETFL);
  is_direct_ = flags >= 0 && ::fcntl(fd_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && direct;
}

absl::Status ShardWriter::write(std::span<const std::byte> bytes, std::int64_t offset) {
  std::size_t done = 0;
  int got = file_calls::write_all(fd_, path_, bytes, static_cast<off_t>(offset), done);
  if (got == -EINVAL && is_direct_) {  // the rest does not begin at a block boundary of the disk, or the disk has
                                       // larger blocks
    set_direct(false);
    std::size_t more = 0;
    got = file_calls::write_all(fd_, path_, bytes.subspan(done), static_cast<off_t>(offset) + static_cast<off_t>(done),
                                more);
    done += more;
  }
  const auto wanted = static_cast<std::int64_t>(bytes.size());
  if (got < 0) return error("write", -got, offset, wanted, static_cast<std::int64_t>(done));
  if (!is_direct_) begin_writeback(offset + wanted);
  return absl::OkStatus();
}

/// Makes the disk begin to write while the next blocks are made, and not only at the fsync. The call is only a hint,
/// which a file system may ignore. If a write fails, fsync reports the error.
void ShardWriter::begin_writeback(std::int64_t end) {
  constexpr std::int64_t kAtOnce = std::int64_t{8} << 20;
  if (end - in_writeback_ < kAtOnce) return;
  ::sync_file_range(fd_, in_writeback_, end - in_writeback_, SYNC_FILE_RANGE_WRITE);
  in_writeback_ = end;
}

absl::Status ShardWriter::other_size() const {
  return make_error(ExitCode::kInternal,
                    fmt::format("{}: {} got {} bytes of data, its header says {}", who_, path_, appended_, wanted_));
}

absl::StatusOr<SavedFile> ShardWriter::finish() {
  if (appended_ != wanted_) return other_size();
  TESSERA_RETURN_IF_ERROR(end_write());
  if (filled_ > hashed_) hash_chunk();
  if (filled_ > 0) {  // the remaining bytes may end inside a block of the disk
    set_direct(false);
    TESSERA_RETURN_IF_ERROR(write(std::span<const std::byte>(blocks_[block_].span()).first(filled_), file_bytes_));
    file_bytes_ += static_cast<std::int64_t>(filled_);
  }
  // fsync is never repeated, not even after EINTR, since it is then unknown whether the data is on the disk.
  if (const int got = file_calls::fsync(fd_, path_); got < 0) return error("fsync", -got);
  // Network file systems report a failed write here.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) return error("close", errno);
  file_.bytes = file_bytes_;
  return std::move(file_);
}

}  // namespace tessera
