#include "checkpoint/shard_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/json_fields.h"
#include "checkpoint/tensor_header.h"
#include "offload/files/sector.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

constexpr std::size_t kLengthBytes = 8;
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::string_view kFormat = "tessera-checkpoint";
/// A piece has 7 JSON values: its object, its type, two lists and their three integers. A header of legal size that has
/// more values than this limit cannot consist of pieces.
constexpr std::size_t kMostValues = std::size_t{1} << 24;

absl::Status corrupt(const std::string& file, const std::string& what) {
  return make_error(ExitCode::kCorruptData, file + ": header: " + what + kDamagedCheckpointHint);
}

/// Reads a key such as "master|blocks.0.weight|512" into the fields `what`, `name` and `offset` of a piece.
bool read_key(std::string_view key, Piece& piece) {
  const std::size_t first = key.find('|'), last = key.rfind('|');
  if (first == std::string_view::npos || first == last || first == 0) return false;
  const std::string_view offset = key.substr(last + 1);
  const auto [end, error] = std::from_chars(offset.data(), offset.data() + offset.size(), piece.offset);
  const bool is_plain = offset == "0" || (!offset.empty() && offset[0] >= '1' && offset[0] <= '9');
  if (!is_plain || error != std::errc() || end != offset.data() + offset.size()) return false;
  piece.what = key.substr(0, first);
  piece.name = key.substr(first + 1, last - first - 1);
  return true;
}

absl::StatusOr<Piece> read_piece(const std::string& file, const JsonNode& node) {
  Piece piece;
  const std::string key = quoted_text(node.key, 120);
  if (!read_key(node.key, piece)) return corrupt(file, "wanted a key such as \"master|weight|0\", got " + key);
  absl::Status status;
  const JsonFields fields(node, file, json_pointer("", node.key), status);
  piece.dtype = fields.text("dtype");
  const std::vector<std::int64_t> shape = fields.integers("shape", 1, ShardHeader::kMostDataBytes);
  const std::vector<std::int64_t> place = fields.integers("data_offsets", 0, ShardHeader::kMostDataBytes);
  TESSERA_RETURN_IF_ERROR(status);
  const std::int64_t size = element_bytes(piece.dtype);
  if (size == 0)
    return corrupt(file, key + " has the type " + quoted_text(piece.dtype) + ", which is none of this format");
  if (shape.size() != 1 || place.size() != 2)
    return corrupt(file,
                   fmt::format("{}: wanted 1 dimension and 2 offsets, got {} and {}", key, shape.size(), place.size()));
  piece.numel = shape[0];
  piece.begin = place[0];
  if (piece.numel > ShardHeader::kMostDataBytes / size || place[1] - place[0] != piece.numel * size)
    return corrupt(file, fmt::format("{}: {} elements of {} bytes do not fit its offsets {} and {}", key, piece.numel,
                                     size, place[0], place[1]));
  if (piece.begin % size != 0)
    return corrupt(file, fmt::format("{} begins at byte {}, which is no multiple of {}", key, piece.begin, size));
  if (piece.offset > ShardHeader::kMostDataBytes) return corrupt(file, key + " has an offset that is too large");
  return piece;
}

absl::Status check_places(const std::string& file, const std::vector<Piece>& pieces, std::int64_t data_bytes) {
  std::int64_t next = 0;
  for (const Piece& piece : pieces) {
    if (piece.begin != next)
      return corrupt(
          file, fmt::format("{} begins at byte {} of the data, wanted {}: pieces {}", quoted_text(piece.key(), 120),
                            piece.begin, next, piece.begin < next ? "overlap" : "leave a hole"));
    next = piece.end();
  }
  if (next == data_bytes) return absl::OkStatus();
  return corrupt(file, fmt::format("its pieces have {} bytes of data, the file has {}", next, data_bytes));
}

}  // namespace

std::int64_t element_bytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, int> kTypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"I64", 8},
                                                         {"I32", 4}, {"I16", 2},  {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
  const auto found = std::ranges::find(kTypes, dtype, &std::pair<std::string_view, int>::first);
  return found == std::end(kTypes) ? 0 : found->second;
}

std::string Piece::key() const { return fmt::format("{}|{}|{}", what, name, offset); }

void place_pieces(std::vector<Piece>& pieces) {
  std::ranges::stable_sort(pieces, std::ranges::greater(),
                           [](const Piece& piece) { return element_bytes(piece.dtype); });
  std::int64_t next = 0;
  for (Piece& piece : pieces) {
    piece.begin = next;
    next = piece.end();
  }
}

std::string write_header(const ShardHeader& header) {
  std::string json = fmt::format(R"({{"{}":{{"format":"{}"}})", kMetadata, kFormat);
  for (const Piece& piece : header.pieces)
    json += safetensors_member(piece.key(), piece.dtype, std::array{piece.numel}, piece.begin, piece.end());
  return safetensors_head(json + "}", kSectorBytes);
}

absl::StatusOr<ShardHeader> read_header(const std::string& file, std::string_view bytes, std::int64_t data_bytes) {
  if (bytes.size() < kLengthBytes)
    return corrupt(file, fmt::format("wanted {} bytes, got {}", kLengthBytes, bytes.size()));
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length != bytes.size() - kLengthBytes || length > static_cast<std::uint64_t>(ShardHeader::kMostBytes))
    return corrupt(file, fmt::format("it says that it has {} bytes, wanted {}", length, bytes.size() - kLengthBytes));
  TESSERA_ASSIGN_OR_RETURN(const JsonNode root, parse_checkpoint_json(file, bytes.substr(kLengthBytes), kMostValues));
  ShardHeader header;
  for (const JsonNode& node : root.children) {
    if (node.key == kMetadata) continue;
    TESSERA_ASSIGN_OR_RETURN(Piece piece, read_piece(file, node));
    header.pieces.push_back(std::move(piece));
  }
  std::ranges::stable_sort(header.pieces, {}, &Piece::begin);
  TESSERA_RETURN_IF_ERROR(check_places(file, header.pieces, data_bytes));
  return header;
}

}  // namespace tessera
