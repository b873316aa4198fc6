#pragma once

#include <cstddef>

#include "optim/arithmetic/instruction_set.h"

/// Forces the compiler to inline a loop's body, which is a lambda.
#define TESSERA_INLINE_BODY __attribute__((always_inline))

namespace tessera {
namespace {

/// Calls `body(i, count)` for the elements [begin, end). Each call has as many elements as a group of registers; the
/// last call may have fewer.
template <class V, class Body>
TESSERA_ALWAYS_INLINE void for_groups(std::size_t begin, std::size_t end, const Body& body) {
  std::size_t i = begin;
  for (; i + V::kWidth <= end; i += V::kWidth) body(i, V::kWidth);
  if (i < end) body(i, end - i);
}

}  // namespace
}  // namespace tessera
