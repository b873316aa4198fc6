#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A tensor in a safetensors file (https://github.com/huggingface/safetensors), in row-major order.
struct FileTensor {
  std::string name;
  std::string dtype;                ///< safetensors' word for the type, such as "F32"
  std::vector<std::int64_t> shape;  ///< sizes of the dimensions; empty for a tensor with one element
  std::int64_t begin = 0;           ///< first byte in the file's data, counted from the beginning of the data
  std::int64_t bytes = 0;

  std::int64_t end() const { return begin + bytes; }
};

/// The header of a safetensors file of other programs: first 8 bytes that hold, in little endian, the length of a JSON
/// object, and then the object. The data follows. (ShardHeader is the header of this project's own shards, whose
/// tensors are pieces.)
struct TensorHeader {
  static constexpr std::int64_t kMostBytes = 100'000'000;  ///< limit for the JSON, the same as in the library
                                                           ///< safetensors
  static constexpr std::int64_t kLengthBytes = 8;
  static constexpr std::size_t kMostDims = 16;
  static constexpr std::size_t kMostNameBytes = 4096;

  std::vector<FileTensor> tensors;  ///< ordered by `begin`
};

/// Returns the number of bits of an element of any safetensors type, also of types that Tessera does not have; 0 for
/// any other word.
std::int64_t element_bits(std::string_view dtype);
/// Returns the product of a shape's sizes; -1 if it is above 2^62 or a size is negative.
std::int64_t numel_of(const std::vector<std::int64_t>& shape);
/// Returns a text such as "[2, 3]".
std::string text_of_shape(const std::vector<std::int64_t>& shape);

/// Reads the JSON of a head. Errors: 65 if the head is not such an object; if a type, a shape or a position is invalid;
/// if tensors overlap, leave holes, or do not end at `data_bytes`; if a name is given twice, has more than
/// kMostNameBytes bytes or has a NUL; or if a tensor has more than kMostDims dimensions. The message names `file` and
/// the tensor.
absl::StatusOr<TensorHeader> read_tensor_header(const std::string& file, std::string_view json,
                                                std::int64_t data_bytes);

/// Returns the length and the JSON, padded with spaces to a multiple of 64 bytes. The metadata is {"format": "pt"},
/// which the library `transformers` requires. REQUIRES: `begin` and `bytes` are set (place_tensors).
std::string write_tensor_header(const std::vector<FileTensor>& tensors);

/// Sets `begin` and `bytes` so that tensors follow each other.
void place_tensors(std::vector<FileTensor>& tensors);

/// The text of the head of a safetensors file (https://github.com/huggingface/safetensors): first 8 bytes that hold, in
/// little endian, the length of a JSON object, and then the object.

/// Returns a tensor as a further member of that object, with a comma in front. `begin`, `end`: bytes counted from the
/// beginning of the data.
std::string safetensors_member(std::string_view name, std::string_view dtype, std::span<const std::int64_t> shape,
                               std::int64_t begin, std::int64_t end);

/// Returns the length and `json`, filled up with spaces to a multiple of `multiple` bytes.
std::string safetensors_head(std::string json, std::size_t multiple = 64);

}  // namespace tessera
