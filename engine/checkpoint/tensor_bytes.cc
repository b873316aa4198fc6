#include "engine/checkpoint/tensor_bytes.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <utility>

#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::pair<c10::ScalarType, const char*> kWords[] = {
    {c10::kFloat, "F32"}, {c10::kBFloat16, "BF16"}, {c10::kHalf, "F16"}, {c10::kDouble, "F64"}, {c10::kLong, "I64"},
    {c10::kInt, "I32"},   {c10::kShort, "I16"},     {c10::kChar, "I8"},  {c10::kByte, "U8"},    {c10::kBool, "BOOL"}};

}  // namespace

std::string safetensors_word(c10::ScalarType type, const std::string& who) {
  for (const auto& [each, word] : kWords) {
    if (each == type) return word;
  }
  throw Error(ExitCode::kUsage, c10::str(who, " is of the type ", type,
                                         ", which checkpoints do not have. [T0094] hint: convert it, or leave it out"));
}

std::string safetensors_word(DType dtype) { return safetensors_word(scalar_type_of(dtype), "a parameter"); }

std::optional<c10::ScalarType> type_of_word(const std::string& word) {
  for (const auto& [type, each] : kWords) {
    if (each == word) return type;
  }
  return std::nullopt;
}

at::Tensor host_copy(const at::Tensor& tensor) {
  const Unrecorded unrecorded;
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type())).copy_(tensor.detach());
}

std::span<std::byte> bytes_of(const at::Tensor& host) {
  return {static_cast<std::byte*>(host.data_ptr()), host.nbytes()};
}

}  // namespace tessera
