#include "checkpoint/saved_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/hash.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

// This file opens and reads checkpoints.
//
// `open` reads the manifest, then the headers of all files, and puts every piece under "what|name" (`tensors_`). It
// then checks that each tensor that the manifest names exists, once and whole, and that there are no other tensors. A
// read goes over the pieces of a tensor part by part (`for_each_part`), and a part lies in one chunk of one file. Each
// chunk has a hash. A whole chunk is read directly into the caller's memory; other chunks are kept in `chunks_`, up to
// the kMostChunks that were used last. `readers_` keeps open the kMostOpenFiles files that were used last.

constexpr std::int64_t kMostManifestBytes = std::int64_t{256} << 20;
constexpr std::size_t kMostOpenFiles = 16;
/// The number of chunks that are kept. Neighbouring parameters of a unit lie in as many files as the run had ranks, and
/// are read from these files alternately. Several chunks are kept, so that the next piece in a file often finds its
/// chunk among them.
constexpr std::size_t kMostChunks = 4;
constexpr std::size_t kNamedPieces = 3;

std::string key_of(const std::string& what, const std::string& name) { return what + "|" + name; }

}  // namespace

std::string of_rank(const std::string& what, std::int64_t rank) { return fmt::format("{}.rank{}", what, rank); }
std::string buffer_of_rank(std::int64_t rank) { return of_rank(kBuffer, rank); }

bool is_name_of_state(std::string_view name) {
  constexpr std::string_view kTaken[] = {kMaster,       kValue,   kBuffer,        kItem, kGenerator,
                                         kGpuGenerator, kFactors, kOuterMomentum, "ema"};
  return !name.empty() && name.find_first_of("|.") == std::string_view::npos &&
         std::ranges::find(kTaken, name) == std::end(kTaken);
}

std::string dtype_of_state(const SavedState& state) {
  return state.format == "8bit" ? "U8" : state.format == "bf16" ? "BF16" : "F32";
}

absl::StatusOr<std::unique_ptr<SavedCheckpoint>> SavedCheckpoint::open(const std::string& folder,
                                                                       const std::string& who) {
  std::unique_ptr<SavedCheckpoint> checkpoint(new SavedCheckpoint(folder, who));
  TESSERA_RETURN_IF_ERROR(checkpoint->read_manifest());
  TESSERA_RETURN_IF_ERROR(checkpoint->read_headers());
  TESSERA_RETURN_IF_ERROR(checkpoint->check_tensors());
  return checkpoint;
}

absl::Status SavedCheckpoint::read_manifest() {
  const std::string path = folder_ + "/manifest.json";
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_regular_text(path, kMostManifestBytes, who_, parts_of_checkpoint(path)));
  hash_ = checkpoint_hash(text);
  TESSERA_ASSIGN_OR_RETURN(manifest_, tessera::read_manifest(who_ + ": " + path, text));
  return absl::OkStatus();
}

absl::Status SavedCheckpoint::read_headers() {
  for (std::size_t file = 0; file < manifest_.files.size(); ++file) {
    ShardReader reader(folder_, manifest_.files[file], who_);
    TESSERA_ASSIGN_OR_RETURN(ShardHeader header, reader.read_header());
    for (Piece& piece : header.pieces) {
      std::vector<Place>& tensor = tensors_[key_of(piece.what, piece.name)];
      tensor.push_back({file, std::move(piece)});
    }
  }
  for (auto& [key, places] : tensors_) {
    std::ranges::stable_sort(places, {}, [](const Place& place) { return place.piece.offset; });
    checked_[key] = false;
  }
  return absl::OkStatus();
}

/// Checks that a tensor's pieces have one type, and follow each other from the first element to the last.
absl::Status SavedCheckpoint::check_tensor(const std::string& what, const std::string& name, const std::string& dtype,
                                           std::int64_t numel) {
  const auto corrupt = [&](const std::string& problem) {
    return make_error(ExitCode::kCorruptData, fmt::format("{}: {}: {} of {}: {}{}", who_, folder_, what,
                                                          quoted_text(name), problem, kDamagedCheckpointHint));
  };
  std::int64_t next = 0;
  for (const Place& place : pieces(what, name)) {
    const Piece& piece = place.piece;
    const std::string& file = manifest_.files[place.file].name;
    if (piece.dtype != dtype) return corrupt(fmt::format("{} has the type {}, wanted {}", file, piece.dtype, dtype));
    if (piece.offset != next)
      return corrupt(fmt::format("{} has it from element {} on, wanted {}: pieces {}", file, piece.offset, next,
                                 piece.offset < next ? "overlap" : "are missing"));
    next += piece.numel;
  }
  if (next != numel) return corrupt(fmt::format("the files have {} elements, wanted {}", next, numel));
  if (const auto found = checked_.find(key_of(what, name)); found != checked_.end()) found->second = true;
  return absl::OkStatus();
}

absl::Status SavedCheckpoint::check_kept_gradients() {
  for (const SavedParameter& parameter : manifest_.parameters) {
    if (!parameter.trains) continue;
    for (std::int64_t rank = 0; rank < manifest_.ranks; ++rank) {
      for (const char* const what : kKeptOfRanks)
        TESSERA_RETURN_IF_ERROR(check_parts(of_rank(what, rank), parameter.name, parameter.numel));
    }
    TESSERA_RETURN_IF_ERROR(check_parts(kFactors, parameter.name, ShardHeader::kMostDataBytes));
  }
  return absl::OkStatus();
}

/// Checks pieces that need not cover the whole tensor, if there are any: they are fp32, do not overlap, and lie in
/// order within `numel` elements.
absl::Status SavedCheckpoint::check_parts(const std::string& what, const std::string& name, std::int64_t numel) {
  std::int64_t next = 0;
  for (const Place& place : pieces(what, name)) {
    const Piece& piece = place.piece;
    if (piece.dtype != "F32" || piece.offset < next || piece.numel > numel - piece.offset)
      return make_error(
          ExitCode::kCorruptData,
          fmt::format("{}: {}/{} has elements {} to {} of {} of {} as {}, wanted F32 and elements from {} to {}{}",
                      who_, folder_, manifest_.files[place.file].name, piece.offset, piece.offset + piece.numel - 1,
                      what, quoted_text(name), piece.dtype, next, numel - 1, kDamagedCheckpointHint));
    next = piece.offset + piece.numel;
  }
  if (const auto found = checked_.find(key_of(what, name)); found != checked_.end()) found->second = true;
  return absl::OkStatus();
}

absl::Status SavedCheckpoint::check_tensors() {
  const std::int64_t block = kScaledElements;
  for (const SavedParameter& parameter : manifest_.parameters) {
    const std::string& name = parameter.name;
    if (!parameter.trains) TESSERA_RETURN_IF_ERROR(check_tensor(kValue, name, parameter.dtype, parameter.numel));
    if (parameter.has_master()) TESSERA_RETURN_IF_ERROR(check_tensor(kMaster, name, "F32", parameter.numel));
    if (parameter.trains && !pieces(kOuterMomentum, name).empty())
      TESSERA_RETURN_IF_ERROR(check_tensor(kOuterMomentum, name, "F32", parameter.numel));
    for (const SavedState& state : manifest_.states) {
      if (!parameter.has_state(state.name)) continue;
      const std::int64_t numel = parameter.numel_of(state.name);
      TESSERA_RETURN_IF_ERROR(check_tensor(state.name, name, dtype_of_state(state), numel));
      if (state.format != "8bit") continue;
      TESSERA_RETURN_IF_ERROR(check_tensor(state.name + kScales, name, "F32", (numel + block - 1) / block));
    }
  }
  for (const SavedTensor& buffer : manifest_.buffers) {
    TESSERA_RETURN_IF_ERROR(check_tensor(kBuffer, buffer.name, buffer.dtype, buffer.numel));
    for (const std::int64_t rank : buffer.ranks)
      TESSERA_RETURN_IF_ERROR(check_tensor(buffer_of_rank(rank), buffer.name, buffer.dtype, buffer.numel));
  }
  for (const SavedTensor& item : manifest_.items)
    TESSERA_RETURN_IF_ERROR(check_tensor(kItem, item.name, item.dtype, item.numel));
  for (std::int64_t rank = 0; rank < manifest_.generators; ++rank) {
    const std::string name = std::to_string(rank);
    const auto numel_of = [&](const char* what) {
      std::int64_t numel = 0;
      for (const Place& place : pieces(what, name)) numel += place.piece.numel;
      return numel;
    };
    TESSERA_RETURN_IF_ERROR(check_tensor(kGenerator, name, "U8", std::max<std::int64_t>(1, numel_of(kGenerator))));
    const std::int64_t of_gpu = numel_of(kGpuGenerator);
    if (of_gpu > 0) TESSERA_RETURN_IF_ERROR(check_tensor(kGpuGenerator, name, "U8", of_gpu));
  }
  if (manifest_.residuals) TESSERA_RETURN_IF_ERROR(check_kept_gradients());
  for (const auto& [key, is_known] : checked_) {
    if (is_known) continue;
    const Place& place = tensors_.at(key).front();
    return make_error(ExitCode::kCorruptData,
                      fmt::format("{}: {}/{} has {}, of which the manifest knows nothing{}", who_, folder_,
                                  manifest_.files[place.file].name, quoted_text(key), kDamagedCheckpointHint));
  }
  checked_.clear();
  return absl::OkStatus();
}

std::span<const SavedCheckpoint::Place> SavedCheckpoint::pieces(const std::string& what,
                                                                const std::string& name) const {
  const auto found = tensors_.find(key_of(what, name));
  if (found == tensors_.end()) return {};
  return found->second;
}

absl::Status SavedCheckpoint::read(const std::string& what, const std::string& name, std::int64_t first,
                                   std::span<std::byte> bytes) {
  return for_each_part(what, name, first, bytes.size(), [&](const Part& part) -> absl::Status {
    const std::span<std::byte> to = bytes.first(part.size);
    bytes = bytes.subspan(part.size);
    if (part.size == reader_of(part.file).chunk_bytes(part.chunk)) return read_chunk(part.file, part.chunk, to);
    TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> from, bytes_of(part));
    std::memcpy(to.data(), from.data(), from.size());
    return absl::OkStatus();
  });
}

absl::StatusOr<std::span<const std::byte>> SavedCheckpoint::view(const std::string& what, const std::string& name,
                                                                 std::int64_t first, std::size_t bytes) {
  std::span<const std::byte> whole;
  joined_.clear();
  TESSERA_RETURN_IF_ERROR(for_each_part(what, name, first, bytes, [&](const Part& part) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> here, bytes_of(part));
    if (here.size() == bytes) {
      whole = here;
    } else {
      joined_.insert(joined_.end(), here.begin(), here.end());
    }
    return absl::OkStatus();
  }));
  return whole.empty() ? std::span<const std::byte>(joined_) : whole;
}

/// Calls `visit(part)`, which returns a status, for the Parts of a tensor's bytes, in order.
template <class Visit>
absl::Status SavedCheckpoint::for_each_part(const std::string& what, const std::string& name, std::int64_t first,
                                            std::size_t bytes, const Visit& visit) {
  const std::span<const Place> places = pieces(what, name);
  auto place = std::ranges::upper_bound(places, first, {}, [](const Place& each) { return each.piece.offset; });
  std::int64_t offset = 0;  // byte offset in the piece
  if (place != places.begin()) {
    --place;
    offset = (first - place->piece.offset) * element_bytes(place->piece.dtype);
  }
  while (bytes > 0) {
    if (place == places.end() || offset >= place->piece.bytes())
      return make_error(ExitCode::kInternal, fmt::format("{}: {} of {} has no element {}", folder_, what, name, first));
    const std::int64_t at = place->piece.begin + offset;
    Part part{place->file, at / SavedFile::kChunkBytes, static_cast<std::size_t>(at % SavedFile::kChunkBytes)};
    part.size = std::min({bytes, static_cast<std::size_t>(SavedFile::kChunkBytes) - part.begin,
                          static_cast<std::size_t>(place->piece.bytes() - offset)});
    TESSERA_RETURN_IF_ERROR(visit(part));
    bytes -= part.size;
    offset += static_cast<std::int64_t>(part.size);
    if (offset == place->piece.bytes()) {
      ++place;
      offset = 0;
    }
  }
  return absl::OkStatus();
}

std::int64_t SavedCheckpoint::chunks() const {
  std::int64_t chunks = 0;
  for (const SavedFile& file : manifest_.files) chunks += file.chunks();
  return chunks;
}

absl::Status SavedCheckpoint::verify(std::int64_t number) {
  std::size_t file = 0;
  for (; number >= manifest_.files[file].chunks(); ++file) number -= manifest_.files[file].chunks();
  return reader_of(file).verify_chunk(number, [&](auto begin, auto end) { return describe(file, begin, end); });
}

ShardReader& SavedCheckpoint::reader_of(std::size_t file) {
  auto found = std::ranges::find(readers_, file, [](const auto& reader) { return reader.first; });
  if (found == readers_.end()) {
    if (readers_.size() == kMostOpenFiles) readers_.pop_back();
    readers_.emplace_front(file, ShardReader(folder_, manifest_.files[file], who_));
    found = readers_.begin();
  }
  readers_.splice(readers_.begin(), readers_, found);
  return readers_.front().second;
}

absl::Status SavedCheckpoint::read_chunk(std::size_t file, std::int64_t index, std::span<std::byte> bytes) {
  return reader_of(file).read_chunk(index, bytes, [&](auto begin, auto end) { return describe(file, begin, end); });
}

absl::StatusOr<std::span<const std::byte>> SavedCheckpoint::bytes_of(const Part& part) {
  TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> chunk, chunk_of(part.file, part.chunk));
  return chunk.subspan(part.begin, part.size);
}

absl::StatusOr<std::span<const std::byte>> SavedCheckpoint::chunk_of(std::size_t file, std::int64_t index) {
  auto found =
      std::ranges::find_if(chunks_, [&](const Chunk& chunk) { return chunk.file == file && chunk.index == index; });
  if (found == chunks_.end()) {
    Chunk chunk{file, index, {}};
    if (chunks_.size() == kMostChunks) {
      chunk.bytes = std::move(chunks_.back().bytes);
      chunks_.pop_back();
    }
    chunk.bytes.resize(reader_of(file).chunk_bytes(index));
    TESSERA_RETURN_IF_ERROR(read_chunk(file, index, chunk.bytes));
    chunks_.push_front(std::move(chunk));
    found = chunks_.begin();
  }
  chunks_.splice(chunks_.begin(), chunks_, found);
  return std::span<const std::byte>(chunks_.front().bytes);
}

/// Returns a text about the pieces in a range of bytes, such as "master of \"a\" (elements 0 to 4095), ... and 3 more".
std::string SavedCheckpoint::describe(std::size_t file, std::int64_t begin, std::int64_t end) const {
  std::vector<const Piece*> found;
  for (const auto& [key, places] : tensors_) {
    for (const Place& place : places) {
      if (place.file == file && place.piece.begin < end && place.piece.end() > begin) found.push_back(&place.piece);
    }
  }
  std::ranges::sort(found, {}, [](const Piece* piece) { return piece->begin; });
  std::vector<std::string> words;
  for (const Piece* piece : found) {
    if (words.size() == kNamedPieces) break;
    words.push_back(fmt::format("{} of {} (elements {} to {})", piece->what, quoted_text(piece->name), piece->offset,
                                piece->offset + piece->numel - 1));
  }
  const std::size_t more = found.size() - words.size();
  return joined(words) + (more > 0 ? fmt::format(" and {} more", more) : "");
}

}  // namespace tessera
