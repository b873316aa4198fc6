#pragma once

#include <cstddef>

#include "runtime/base/wire/wire_block.h"
#include "tessera/dtype.h"

namespace tessera {

/// Messages of a lossy form of the wire (runtime/base/wire/wire_block.h), which lie one after the other: one for each
/// of `parts` equal parts of some values. In memory, the values are elements of `dtype` (fp32, bf16, fp16), one part
/// after the other.
struct EncodedParts {
  WireForm form = WireForm::kInt8;
  DType dtype = DType::kF32;
  std::size_t part_numel = 0;  ///< number of elements of each part
  std::size_t parts = 1;

  TESSERA_ALWAYS_INLINE std::size_t part_bytes() const { return encoded_bytes(form, part_numel); }
  /// Returns the number of bytes of all messages.
  TESSERA_ALWAYS_INLINE std::size_t bytes() const { return parts * part_bytes(); }
  /// Returns the number of blocks of all messages.
  TESSERA_ALWAYS_INLINE std::size_t blocks() const { return parts * codec_blocks(part_numel); }
};

}  // namespace tessera
