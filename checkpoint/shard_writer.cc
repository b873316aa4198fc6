#include "checkpoint/shard_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "checkpoint/hash.h"
#include "offload/fault_environment.h"
#include "offload/file_calls.h"
#include "offload/file_error.h"
#include "offload/retries.h"
#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<ShardWriter>> ShardWriter::create(const std::string& folder, const std::string& name,
                                                                 const ShardHeader& header, const std::string& who) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  std::unique_ptr<ShardWriter> writer(new ShardWriter(folder + "/" + name, who));
  const int got = retried(
      [&] { return file_calls::open(writer->path_, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600); });
  if (got < 0) return writer->error("create", -got);
  writer->fd_ = got;
  const std::string head = write_header(header);
  writer->wanted_ = header.data_bytes();
  writer->file_.name = name;
  writer->file_.header_bytes = static_cast<std::int64_t>(head.size());
  writer->file_.header_hash = checkpoint_hash(head);
  writer->chunk_.reserve(static_cast<std::size_t>(std::min(SavedFile::kChunkBytes, writer->wanted_)));
  TESSERA_RETURN_IF_ERROR(writer->write(std::as_bytes(std::span(head))));
  return writer;
}

ShardWriter::~ShardWriter() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status ShardWriter::error(const char* operation, int error, std::int64_t wanted, std::int64_t got) const {
  return file_error({.who = who_,
                     .operation = operation,
                     .file = path_,
                     .folder = std::filesystem::path(path_).parent_path().string(),
                     .offset = wanted >= 0 ? file_bytes_ : -1,
                     .wanted = wanted,
                     .got = got,
                     .error = error});
}

absl::Status ShardWriter::append(std::span<const std::byte> data) {
  appended_ += static_cast<std::int64_t>(data.size());
  while (!data.empty()) {
    const std::size_t room = static_cast<std::size_t>(SavedFile::kChunkBytes) - chunk_.size();
    const auto next = data.first(std::min(room, data.size()));
    chunk_.insert(chunk_.end(), next.begin(), next.end());
    data = data.subspan(next.size());
    if (chunk_.size() == static_cast<std::size_t>(SavedFile::kChunkBytes)) TESSERA_RETURN_IF_ERROR(write_chunk());
  }
  return absl::OkStatus();
}

absl::Status ShardWriter::write_chunk() {
  file_.chunk_hashes.push_back(checkpoint_hash(chunk_));
  TESSERA_RETURN_IF_ERROR(write(chunk_));
  chunk_.clear();
  return absl::OkStatus();
}

absl::Status ShardWriter::write(std::span<const std::byte> bytes) {
  const auto wanted = static_cast<std::int64_t>(bytes.size());
  std::size_t done = 0;
  const int got = file_calls::write_all(fd_, path_, bytes, static_cast<off_t>(file_bytes_), done);
  if (got < 0) return error("write", -got, wanted, static_cast<std::int64_t>(done));
  file_bytes_ += wanted;
  begin_writeback();
  return absl::OkStatus();
}

/// Lets the disk begin with what is written while the next chunks are made, and not at the fsync. A hint: where a file system does not
/// take it, or fails, fsync says so.
void ShardWriter::begin_writeback() {
  constexpr std::int64_t kAtOnce = std::int64_t{8} << 20;
  if (file_bytes_ - in_writeback_ < kAtOnce) return;
  ::sync_file_range(fd_, in_writeback_, file_bytes_ - in_writeback_, SYNC_FILE_RANGE_WRITE);
  in_writeback_ = file_bytes_;
}

absl::StatusOr<SavedFile> ShardWriter::finish() {
  if (!chunk_.empty()) TESSERA_RETURN_IF_ERROR(write_chunk());
  if (appended_ != wanted_)
    return make_error(ExitCode::kInternal,
                      fmt::format("{}: {} got {} bytes of data, its header says {}", who_, path_, appended_, wanted_));
  // Never repeated, not even after EINTR: whether the data is on the disk is unknown then.
  if (const int got = file_calls::fsync(fd_, path_); got < 0) return error("fsync", -got);
  // Network file systems report a failed write here.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) return error("close", errno);
  file_.bytes = file_bytes_;
  return std::move(file_);
}

}  // namespace tessera
