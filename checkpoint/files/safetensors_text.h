#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The text of the head of a safetensors file (https://github.com/huggingface/safetensors): 8 bytes with the length of
/// a JSON object in little endian, and the object.

/// Returns a tensor as a further member of that object, with a comma in front. `begin`, `end`: bytes counted from the
/// beginning of the data.
std::string safetensors_member(std::string_view name, std::string_view dtype, std::span<const std::int64_t> shape,
                               std::int64_t begin, std::int64_t end);

/// Returns the length and `json`, filled up with spaces to a multiple of `multiple` bytes.
std::string safetensors_head(std::string json, std::size_t multiple = 64);

}  // namespace tessera
