#pragma once

#include <cstddef>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// What a form on the wire (compression.gradients, sums, gathers) costs this processor and takes off the wire.
struct CodecSpeed {
  WireForm form = WireForm::kPlain;
  double share = 1;             ///< of the bytes of fp32
  double seconds_per_byte = 0;  ///< of fp32: one thread writes the form and reads it back
};

/// Of every form but kPlain, on numbers of a normal distribution: medians of a few rounds over 16 MiB, in some tenths of a second together.
std::vector<CodecSpeed> measure_codecs();

}  // namespace tessera
