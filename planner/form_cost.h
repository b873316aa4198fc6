#pragma once

#include <cstdint>

#include "planner/measured/links.h"
#include "tessera/dtype.h"

namespace tessera {

/// Bytes of `numel` elements as they are sent: in `form`, or as they are, in `dtype`. Lossy forms are those of
/// runtime/comm/sum/wire_codec.h: an fp32 scale for every 256 elements, and a byte or half a byte an element, to a
/// multiple of 4. Packed ones (lossless.h) have the size that a normal distribution gives: 0.853 of fp32's
/// bytes, 0.70 of bf16's; that short messages are not packed is not looked at.
std::int64_t bytes_on_wire(WireForm form, DType dtype, std::int64_t numel);

/// Seconds of a core in which `numel` elements are written in `form`, and as many are read; an element of a narrow dtype takes as long as one of
/// fp32. 0 where `dtype` goes as it is.
double coding_seconds(const CodingFit& coding, WireForm form, DType dtype, std::int64_t numel);

/// `cost`, of a call whose messages a core of the rank writes and reads for `coding_s` while others are on the wire, piece by piece: it
/// takes what the longer of the two takes.
CallCost with_coding(CallCost cost, double coding_s);

/// Of an all-gather of `ranks` ranks, each of which sends `numel` elements, in `form`.
CallCost all_gather_in(WireForm form, DType dtype, std::int64_t numel, const Links& links, int ranks);

}  // namespace tessera
