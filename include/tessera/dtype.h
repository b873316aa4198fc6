#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

/// Element types that Tessera stores, reduces or sends. They are defined without LibTorch, because layers without
/// LibTorch need them too.
enum class DType : std::uint8_t { kF32, kBF16, kF16, kF64, kI64, kI32, kU8 };

/// Returns the bytes of one element.
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

/// Returns the name that the strategy file and messages use: "fp32", "bf16", "fp16", ...
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

/// The codec of numbers on the wire. int8 and int4 are lossy: each run of 256 elements has one fp32 scale. The scale is
/// the largest magnitude in the run divided by the largest whole number of the codec. Each element is rounded to the
/// nearest multiple of the scale.
enum class WireForm : std::uint8_t {
  kPlain,     ///< "none": sent unchanged
  kInt8,      ///< "int8": 1.016 bytes for each element
  kInt4,      ///< "int4": 0.516 bytes for each element
  kLossless,  ///< "lossless": compressed, with all bits kept; gradients take about 0.85 of fp32's bytes, or 0.7 of
              ///< bf16's
};

/// Returns whether the codec rounds.
constexpr bool is_lossy(WireForm form) { return form == WireForm::kInt8 || form == WireForm::kInt4; }

/// The form in which each state of the optimizer (moment, momentum) is kept.
enum class StateDType {
  kF32,   ///< "fp32"
  kBF16,  ///< "bf16", rounded stochastically
  k8Bit,  ///< "8bit": one byte for each element, and an fp32 scale for every 256 elements
};

/// The form of the fp32 master weights of bf16 parameters. An fp32 parameter is its own master; the masters of fp16
/// parameters are always kept in fp32.
enum class MasterKind {
  kF32,        ///< "fp32": whole masters, in addition to the parameters
  kSplitBF16,  ///< "split": only the 16 bits of each master that the parameter lacks
};

}  // namespace tessera
