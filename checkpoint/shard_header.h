#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns the number of bytes of an element of a safetensors type: "F32", "BF16", "F16", "F64", "I64", "I32", "I16",
/// "I8", "U8" or "BOOL". Returns 0 for any other word.
std::int64_t element_bytes(std::string_view dtype);

/// A run of elements of one tensor of the training state, as it lies in a file.
struct Piece {
  std::string what;         ///< which tensor of the parameter, such as "master" or "exp_avg" (checkpoint/manifest.h)
  std::string name;         ///< name of the parameter, buffer or item
  std::string dtype;        ///< safetensors' word for the type, such as "F32"
  std::int64_t offset = 0;  ///< first element of the piece, counted in the tensor's own memory order
  std::int64_t numel = 0;   ///< number of elements, more than 0
  std::int64_t begin = 0;   ///< first byte in the file's data, counted from the beginning of the data

  std::int64_t bytes() const { return numel * element_bytes(dtype); }
  std::int64_t end() const { return begin + bytes(); }
  /// Returns the name of the piece in the file, such as "master|blocks.0.weight|512". Neither `what` nor the offset
  /// contains a '|'.
  std::string key() const;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// The head of a safetensors file (https://github.com/huggingface/safetensors): first 8 bytes that hold, in little
/// endian, the length of a JSON object, and then the object. The data follows without holes. Each piece is a tensor of
/// one dimension.
struct ShardHeader {
  static constexpr std::int64_t kMostBytes = 100'000'000;  ///< limit for the JSON, the same as in the library
                                                           ///< safetensors
  /// Other tools might not read JSON integers exactly if a piece ends beyond this byte.
  static constexpr std::int64_t kMostDataBytes = std::int64_t{1} << 53;

  std::vector<Piece> pieces;  ///< in the order of the file

  std::int64_t data_bytes() const { return pieces.empty() ? 0 : pieces.back().end(); }
};

/// Places pieces one after another, and sets `begin`. Pieces with wide elements come first, so that each piece begins
/// at a multiple of its element's size. Otherwise the order does not change.
void place_pieces(std::vector<Piece>& pieces);

/// Returns the length and the JSON, padded with spaces to a multiple of 4096 bytes, so that the data may be written
/// past the page cache.
std::string write_header(const ShardHeader& header);

/// Reads a head that write_header wrote; `bytes` is the whole head. Errors: 65 if write_header cannot have written the
/// head, or if pieces are wrong: if they overlap, leave holes, repeat a key, have a wrong number of bytes, do not begin
/// at a multiple of their element's size, or do not end at `data_bytes`. The message names `file` and the key.
absl::StatusOr<ShardHeader> read_header(const std::string& file, std::string_view bytes, std::int64_t data_bytes);

}  // namespace tessera
