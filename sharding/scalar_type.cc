#include "sharding/scalar_type.h"

#include "runtime/border/throw.h"

namespace tessera {

DType dtype_of(c10::ScalarType type, const std::string& who) {
  switch (type) {
    case c10::kFloat:
      return DType::kF32;
    case c10::kBFloat16:
      return DType::kBF16;
    case c10::kHalf:
      return DType::kF16;
    case c10::kDouble:
      return DType::kF64;
    case c10::kLong:
      return DType::kI64;
    case c10::kInt:
      return DType::kI32;
    case c10::kByte:
      return DType::kU8;
    case c10::kComplexHalf:
    case c10::kComplexFloat:
    case c10::kComplexDouble:
      throw Error(ExitCode::kConfig,
                  who + " has dtype " + c10::toString(type) +
                      ", and complex numbers are not sharded. [T1086] hint: keep real numbers x with a last "
                      "dimension of 2 instead, and take complex(x.select(-1, 0), x.select(-1, 1)) in forward");
    default:
      throw Error(ExitCode::kConfig, who + " has dtype " + c10::toString(type) +
                                         ", which cannot be sharded. [T0626] hint: make it a buffer, or another dtype");
  }
}

c10::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return c10::kFloat;
    case DType::kBF16:
      return c10::kBFloat16;
    case DType::kF16:
      return c10::kHalf;
    case DType::kF64:
      return c10::kDouble;
    case DType::kI64:
      return c10::kLong;
    case DType::kI32:
      return c10::kInt;
    case DType::kU8:
      return c10::kByte;
  }
  return c10::kFloat;
}

bool is_trainable(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16; }

}  // namespace tessera
