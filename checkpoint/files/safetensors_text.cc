#include "checkpoint/files/safetensors_text.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

namespace tessera {

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

std::string safetensors_member(std::string_view name, std::string_view dtype, std::span<const std::int64_t> shape,
                               std::int64_t begin, std::int64_t end) {
  return fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", nlohmann::json(name).dump(), dtype,
                     fmt::join(shape, ","), begin, end);
}

std::string safetensors_head(std::string json, std::size_t multiple) {
  constexpr std::size_t kLengthBytes = 8;
  json.append((multiple - (kLengthBytes + json.size()) % multiple) % multiple, ' ');
  const std::uint64_t length = json.size();
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, kLengthBytes);
  return head + json;
}

}  // namespace tessera
