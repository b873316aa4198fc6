#include "checkpoint/shard_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/hash.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 18;  ///< bytes of a block, which stays in a core's cache between
                                                        ///< reading and hashing

}  // namespace

ShardReader::ShardReader(std::string folder, const SavedFile& file, std::string who)
    : path_(std::move(folder) + "/" + file.name), who_(std::move(who)), file_(file) {}

absl::Status ShardReader::open() {
  if (opened_) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(RegularFile file, RegularFile::open(path_, who_, parts_of_checkpoint(path_)));
  if (file.bytes() != file_.bytes)
    return make_error(ExitCode::kCorruptData, fmt::format("{}: {} has {} bytes, the manifest wants {}{}", who_, path_,
                                                          file.bytes(), file_.bytes, kDamagedCheckpointHint));
  file.read_in_order();
  opened_ = std::move(file);
  return absl::OkStatus();
}

absl::Status ShardReader::read(std::int64_t offset, std::span<std::byte> bytes) {
  TESSERA_RETURN_IF_ERROR(open());
  return opened_->read(offset, bytes);
}

absl::StatusOr<ShardHeader> ShardReader::read_header() {
  TESSERA_RETURN_IF_ERROR(open());  // opens the file first, so that no memory is allocated for a missing file
  std::string head(static_cast<std::size_t>(file_.header_bytes), '\0');
  TESSERA_RETURN_IF_ERROR(read(0, std::as_writable_bytes(std::span(head))));
  if (const std::uint64_t got = checkpoint_hash(head); got != file_.header_hash)
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("{}: {}: the header at offset 0 is damaged: its {} bytes have the hash {}, wanted {}{}", who_,
                    path_, head.size(), hash_text(got), hash_text(file_.header_hash), kDamagedCheckpointHint));
  return tessera::read_header(who_ + ": " + path_, head, file_.data_bytes());
}

ShardReader::Range ShardReader::range_of(std::int64_t chunk) const {
  const std::int64_t begin = chunk * SavedFile::kChunkBytes;
  return {begin, std::min(begin + SavedFile::kChunkBytes, file_.data_bytes())};
}

absl::Status ShardReader::check(std::int64_t chunk, std::uint64_t got, const Describe& describe) const {
  const std::uint64_t wanted = file_.chunk_hashes[static_cast<std::size_t>(chunk)];
  if (got == wanted) return absl::OkStatus();
  const auto [begin, end] = range_of(chunk);
  return make_error(
      ExitCode::kCorruptData,
      fmt::format("{}: {}: the {} bytes at offset {} are damaged: they have the hash {}, wanted {}. They hold {}{}",
                  who_, path_, end - begin, file_.header_bytes + begin, hash_text(got), hash_text(wanted),
                  describe(begin, end), kDamagedCheckpointHint));
}

std::size_t ShardReader::chunk_bytes(std::int64_t chunk) const {
  const auto [begin, end] = range_of(chunk);
  return static_cast<std::size_t>(end - begin);
}

template <class Memory>
absl::Status ShardReader::read_blocks(std::int64_t chunk, const Memory& memory, const Describe& describe) {
  const auto [begin, end] = range_of(chunk);
  RunningHash hash;
  for (std::int64_t at = begin; at < end; at += kBlock) {
    const std::span<std::byte> block =
        memory(static_cast<std::size_t>(at - begin), static_cast<std::size_t>(std::min(kBlock, end - at)));
    TESSERA_RETURN_IF_ERROR(read(file_.header_bytes + at, block));
    hash.add(block);
  }
  return check(chunk, hash.value(), describe);
}

absl::Status ShardReader::read_chunk(std::int64_t chunk, std::span<std::byte> bytes, const Describe& describe) {
  const auto place = [&](std::size_t offset, std::size_t size) { return bytes.subspan(offset, size); };
  return read_blocks(chunk, place, describe);
}

absl::Status ShardReader::verify_chunk(std::int64_t chunk, const Describe& describe) {
  block_.resize(static_cast<std::size_t>(kBlock));
  const auto same_place = [&](std::size_t, std::size_t size) { return std::span(block_).first(size); };
  return read_blocks(chunk, same_place, describe);
}

}  // namespace tessera
