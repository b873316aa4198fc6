#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// Numbers of a normal distribution, and memory to encode and decode them.
class CodecRun {
 public:
  explicit CodecRun(std::size_t numel);

  /// Encodes and decodes on this thread. Returns the number of encoded bytes.
  std::size_t there_and_back(WireForm form);
  double plain_bytes() const { return static_cast<double>(values_.size() * sizeof(float)); }

 private:
  std::vector<float> values_, read_;
  std::vector<std::uint32_t> wire_;
};

/// The time for which a codec (compression.gradients, sums, gathers) uses this processor, and the bytes that it saves
/// on the wire.
struct CodecSpeed {
  WireForm form = WireForm::kPlain;
  double share = 1;             ///< fraction of the bytes of fp32
  double seconds_per_byte = 0;  ///< seconds in which one thread encodes and decodes a byte of fp32
};

/// Measures every codec except kPlain. The results are medians of a few rounds over 16 MiB. Measuring all of them takes
/// a few tenths of a second.
std::vector<CodecSpeed> measure_codecs();

}  // namespace tessera
