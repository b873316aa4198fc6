#include "checkpoint/tensor_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/files/damage.h"
#include "checkpoint/files/json_fields.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
/// The largest number of JSON values in a header; each needs some 200 bytes of memory. A tensor has 6 values, and one
/// more for each dimension.
constexpr std::size_t kMostHeaderValues = std::size_t{1} << 21;
constexpr std::int64_t kMostNumel = std::int64_t{1} << 62;
constexpr std::size_t kMostNameInMessages = 120;

absl::Status corrupt_header(const std::string& file, const std::string& what) {
  return make_error(ExitCode::kCorruptData, file + ": header: " + what + kDamagedFileHint);
}

absl::Status check_metadata(const std::string& file, const JsonNode& node) {
  if (!node.is_object()) return corrupt_header(file, "__metadata__ wants an object, got " + describe(node));
  for (const JsonNode& child : node.children)
    if (!child.value.is_string())
      return corrupt_header(file, fmt::format("__metadata__ wants strings, and {} is {}",
                                              quoted_text(child.key, kMostNameInMessages), describe(child)));
  return absl::OkStatus();
}

absl::StatusOr<FileTensor> read_tensor(const std::string& file, const JsonNode& node) {
  const std::string name = "tensor " + quoted_text(node.key, kMostNameInMessages);
  if (node.key.size() > TensorHeader::kMostNameBytes || node.key.find('\0') != std::string::npos)
    return corrupt_header(file, fmt::format("{}: a name has at most {} bytes and no NUL, this one has {}", name,
                                            TensorHeader::kMostNameBytes, node.key.size()));
  absl::Status status;
  const JsonFields fields(node, file, json_pointer("", node.key), status);
  FileTensor tensor{.name = node.key, .dtype = fields.text("dtype"), .shape = fields.integers("shape", 0, kMostNumel)};
  const std::vector<std::int64_t> place = fields.integers("data_offsets", 0, kMostNumel);
  TESSERA_RETURN_IF_ERROR(status);
  if (node.children.size() != 3)
    return corrupt_header(file, name + " wants dtype, shape and data_offsets, and has other members too");
  const std::int64_t bits = element_bits(tensor.dtype), numel = numel_of(tensor.shape);
  if (bits == 0)
    return corrupt_header(file, name + " has the type " + quoted_text(tensor.dtype) + ", which is not known");
  if (tensor.shape.size() > TensorHeader::kMostDims)
    return corrupt_header(file, fmt::format("{} has {} dimensions, wanted at most {}", name, tensor.shape.size(),
                                            TensorHeader::kMostDims));
  if (place.size() != 2 || place[0] > place[1])
    return corrupt_header(file, name + ": data_offsets want a begin and an end that is not before it");
  tensor.begin = place[0];
  tensor.bytes = place[1] - place[0];
  if (numel < 0 || numel > kMostNumel / bits || numel * bits % 8 != 0 || tensor.bytes != numel * bits / 8)
    return corrupt_header(file, fmt::format("{}: {} of shape {} do not fit its {} bytes", name, tensor.dtype,
                                            text_of_shape(tensor.shape), tensor.bytes));
  return tensor;
}

absl::Status check_places(const std::string& file, const std::vector<FileTensor>& tensors, std::int64_t data_bytes) {
  std::int64_t next = 0;
  for (const FileTensor& tensor : tensors) {
    if (tensor.begin != next)
      return corrupt_header(file, fmt::format("tensor {} begins at byte {} of the data, wanted {}: tensors {}",
                                              quoted_text(tensor.name, kMostNameInMessages), tensor.begin, next,
                                              tensor.begin < next ? "overlap" : "leave a hole"));
    next = tensor.end();
  }
  if (next == data_bytes) return absl::OkStatus();
  return corrupt_header(file, fmt::format("its tensors have {} bytes, the file has {} of data", next, data_bytes));
}

}  // namespace

std::int64_t element_bits(std::string_view dtype) {
  constexpr std::pair<std::string_view, int> kTypes[] = {
      {"F32", 32},    {"BF16", 16},   {"F16", 16}, {"F64", 64}, {"I64", 64},    {"I32", 32},   {"I16", 16},
      {"I8", 8},      {"U8", 8},      {"BOOL", 8}, {"U16", 16}, {"U32", 32},    {"U64", 64},   {"F8_E4M3", 8},
      {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"C64", 64}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  const auto found = std::ranges::find(kTypes, dtype, &std::pair<std::string_view, int>::first);
  return found == std::end(kTypes) ? 0 : found->second;
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && numel > kMostNumel / size)) return -1;
    numel *= size;
  }
  return numel;
}

std::string text_of_shape(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

absl::StatusOr<TensorHeader> read_tensor_header(const std::string& file, std::string_view json,
                                                std::int64_t data_bytes) {
  if (!json.starts_with('{')) return corrupt_header(file, "it does not begin with '{'");
  TESSERA_ASSIGN_OR_RETURN(const JsonNode root, parse_checkpoint_json(file, json, kMostHeaderValues));
  TensorHeader header;
  for (const JsonNode& node : root.children) {
    if (node.key == kMetadataKey) {
      TESSERA_RETURN_IF_ERROR(check_metadata(file, node));
      continue;
    }
    TESSERA_ASSIGN_OR_RETURN(FileTensor tensor, read_tensor(file, node));
    header.tensors.push_back(std::move(tensor));
  }
  std::ranges::stable_sort(header.tensors, {},
                           [](const FileTensor& tensor) { return std::pair(tensor.begin, tensor.end()); });
  TESSERA_RETURN_IF_ERROR(check_places(file, header.tensors, data_bytes));
  return header;
}

std::string write_tensor_header(const std::vector<FileTensor>& tensors) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  for (const FileTensor& tensor : tensors)
    json += safetensors_member(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.end());
  return safetensors_head(json + "}");
}

void place_tensors(std::vector<FileTensor>& tensors) {
  std::int64_t next = 0;
  for (FileTensor& tensor : tensors) {
    tensor.begin = next;
    tensor.bytes = numel_of(tensor.shape) * element_bits(tensor.dtype) / 8;
    next = tensor.end();
  }
}

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
