#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// Numbers of a normal distribution, and room to write them in a form and to read them back.
class CodecRun {
 public:
  explicit CodecRun(std::size_t numel);

  /// Writes and reads on this thread; returns the bytes that they had in between.
  std::size_t there_and_back(WireForm form);
  double plain_bytes() const { return static_cast<double>(values_.size() * sizeof(float)); }

 private:
  std::vector<float> values_, read_;
  std::vector<std::uint32_t> wire_;
};

/// What a form on the wire (compression.gradients, sums, gathers) costs this processor and takes off the wire.
struct CodecSpeed {
  WireForm form = WireForm::kPlain;
  double share = 1;             ///< of the bytes of fp32
  double seconds_per_byte = 0;  ///< of fp32: one thread writes the form and reads it back
};

/// Of every form but kPlain: medians of a few rounds over 16 MiB, in some tenths of a second together.
std::vector<CodecSpeed> measure_codecs();

}  // namespace tessera
