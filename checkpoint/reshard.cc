#include "checkpoint/reshard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/shard_writer.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::int64_t kPortionBytes = std::int64_t{1} << 20;
constexpr std::int64_t kBlock = kScaledElements;

std::int64_t blocks_of(std::int64_t numel) { return (numel + kBlock - 1) / kBlock; }

/// Adds elements [first, first + numel) of a tensor to a file, if `from` has the tensor. Otherwise it adds nothing.
void add_piece(const SavedCheckpoint& from, const std::string& what, const std::string& name, std::int64_t first,
               std::int64_t numel, std::vector<Piece>& pieces) {
  const std::span<const SavedCheckpoint::Place> places = from.pieces(what, name);
  if (places.empty() || numel == 0) return;
  pieces.push_back({what, name, places[0].piece.dtype, first, numel});
}

void add_whole(const SavedCheckpoint& from, const std::string& what, const std::string& name,
               std::vector<Piece>& pieces) {
  const std::span<const SavedCheckpoint::Place> places = from.pieces(what, name);
  if (places.empty()) return;
  add_piece(from, what, name, 0, places.back().piece.offset + places.back().piece.numel, pieces);
}

/// Adds elements [first, first + numel) of a parameter and of its element-wise states. `first` is a multiple of
/// kBlock.
void add_parameter(const SavedCheckpoint& from, const SavedParameter& parameter, std::int64_t first, std::int64_t numel,
                   std::vector<Piece>& pieces) {
  const std::string& name = parameter.name;
  add_piece(from, kValue, name, first, numel, pieces);
  add_piece(from, kMaster, name, first, numel, pieces);
  add_piece(from, kOuterMomentum, name, first, numel, pieces);
  for (const SavedState& state : from.manifest().states) {
    if (!parameter.has_state(state.name) || parameter.state_shapes.contains(state.name)) continue;
    add_piece(from, state.name, name, first, numel, pieces);
    add_piece(from, state.name + kScales, name, first / kBlock, blocks_of(numel), pieces);
  }
}

/// Adds the pieces that belong to single ranks of the run, uncut. All of a rank's pieces go to the same file.
void add_residuals(const SavedCheckpoint& from, std::vector<std::vector<Piece>>& pieces) {
  const Manifest& manifest = from.manifest();
  if (!manifest.residuals) return;
  for (const SavedParameter& parameter : manifest.parameters) {
    for (std::int64_t rank = 0; rank < manifest.ranks; ++rank) {
      std::vector<Piece>& file = pieces[static_cast<std::size_t>(rank) % pieces.size()];
      for (const char* const what : kKeptOfRanks) {
        for (const SavedCheckpoint::Place& place : from.pieces(of_rank(what, rank), parameter.name))
          file.push_back(place.piece);
      }
    }
    add_whole(from, kFactors, parameter.name, pieces[0]);
  }
}

/// Adds all pieces that do not belong to a parameter.
void add_the_rest(const SavedCheckpoint& from, std::vector<Piece>& pieces) {
  const Manifest& manifest = from.manifest();
  for (const SavedTensor& buffer : manifest.buffers) {
    add_whole(from, kBuffer, buffer.name, pieces);
    for (const std::int64_t rank : buffer.ranks) add_whole(from, buffer_of_rank(rank), buffer.name, pieces);
  }
  for (const SavedTensor& item : manifest.items) add_whole(from, kItem, item.name, pieces);
  for (std::int64_t rank = 0; rank < manifest.generators; ++rank) {
    for (const char* const what : {kGenerator, kGpuGenerator}) add_whole(from, what, std::to_string(rank), pieces);
  }
}

/// Returns [file]: its pieces. All parameters, one after another, are cut into as many runs as there are files. The
/// runs have equal numbers of blocks, except that the last runs may be shorter or empty.
std::vector<std::vector<Piece>> cut(const SavedCheckpoint& from, std::int64_t files) {
  std::int64_t all = 0;
  for (const SavedParameter& parameter : from.manifest().parameters) all += blocks_of(parameter.numel);
  const std::int64_t run = std::max<std::int64_t>(1, (all + files - 1) / files);
  std::vector<std::vector<Piece>> pieces(static_cast<std::size_t>(files));
  std::int64_t before = 0;  // number of blocks of the parameters before this one
  for (const SavedParameter& parameter : from.manifest().parameters) {
    const std::int64_t blocks = blocks_of(parameter.numel);
    for (const auto& [state, shape] : parameter.state_shapes) {
      add_whole(from, state, parameter.name, pieces[static_cast<std::size_t>(std::min(before / run, files - 1))]);
    }
    for (std::int64_t block = 0; block < blocks;) {
      const std::int64_t file = (before + block) / run;
      const std::int64_t end = std::min(blocks, (file + 1) * run - before);
      const std::int64_t first = block * kBlock, last = std::min(parameter.numel, end * kBlock);
      add_parameter(from, parameter, first, last - first, pieces[static_cast<std::size_t>(file)]);
      block = end;
    }
    before += blocks;
  }
  add_residuals(from, pieces);
  add_the_rest(from, pieces[0]);
  return pieces;
}

absl::StatusOr<SavedFile> write_file(SavedCheckpoint& from, const std::string& folder, const std::string& name,
                                     std::vector<Piece> pieces, const std::string& who) {
  ShardHeader header;
  place_pieces(pieces);
  header.pieces = std::move(pieces);
  TESSERA_ASSIGN_OR_RETURN(const auto writer, ShardWriter::create(folder, name, header, who));
  std::vector<std::byte> portion;
  for (const Piece& piece : header.pieces) {
    const std::int64_t element = element_bytes(piece.dtype), most = kPortionBytes / element;
    for (std::int64_t done = 0; done < piece.numel; done += most) {
      portion.resize(static_cast<std::size_t>(std::min(most, piece.numel - done) * element));
      const std::int64_t first = piece.offset + (seeded_fault(SeededFault::kPortionsAlike) ? 0 : done);
      TESSERA_RETURN_IF_ERROR(from.read(piece.what, piece.name, first, portion));
      TESSERA_RETURN_IF_ERROR(writer->append(portion));
    }
  }
  return writer->finish();
}

}  // namespace

absl::StatusOr<std::string> reshard_checkpoint(SavedCheckpoint& from, const std::string& folder, std::int64_t files,
                                               const std::string& who) {
  if (files < 1 || files > kMostShards)
    return make_error(
        ExitCode::kUsage,
        fmt::format(
            "{}: a checkpoint is cut into 1 to {} files, not into {}. [T0080] hint: give a number in between (--files)",
            who, kMostShards, files));
  Manifest manifest = from.manifest();
  manifest.files.clear();
  TESSERA_ASSIGN_OR_RETURN(const auto unfinished, UnfinishedCheckpoint::begin(folder, manifest.step, who));
  const std::vector<std::vector<Piece>> pieces = cut(from, files);
  for (std::size_t file = 0; file < pieces.size(); ++file) {
    TESSERA_ASSIGN_OR_RETURN(
        SavedFile saved,
        write_file(from, unfinished->path(), fmt::format("rank-{:05}.safetensors", file), pieces[file], who));
    manifest.files.push_back(std::move(saved));
  }
  return unfinished->commit(write_manifest(manifest));
}

}  // namespace tessera
