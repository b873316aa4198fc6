#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

/// Element types that Tessera stores, reduces or sends. A LibTorch `ScalarType` maps onto one of them in
/// `sharding/torch_dtype.h`; this enum exists so that the layers below LibTorch can name a type.
enum class DType : std::uint8_t { kF32, kBF16, kF16, kF64, kI64, kI32, kU8 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

/// Name as the strategy file and every message spell it: "fp32", "bf16", "fp16", ...
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kF64:
      return "fp64";
    case DType::kI64:
      return "int64";
    case DType::kI32:
      return "int32";
    case DType::kU8:
      return "uint8";
  }
  return "?";
}

}  // namespace tessera
