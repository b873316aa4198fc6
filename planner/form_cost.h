#pragma once

#include <cstdint>

#include "planner/measured/links.h"
#include "tessera/dtype.h"

namespace tessera {

/// Returns the bytes of `numel` elements on the wire, in the codec `form`, or unchanged in `dtype`. Lossy codecs are
/// those of runtime/comm/sum/wire_codec.h: an fp32 scale for every 256 elements, and a byte or half a byte an element,
/// rounded up to a multiple of 4. The lossless codec (lossless.h) has the size that a normal distribution gives: 0.853
/// of fp32's bytes, 0.70 of bf16's. The model ignores that short messages are not compressed.
std::int64_t bytes_on_wire(WireForm form, DType dtype, std::int64_t numel);

/// Returns the seconds in which a core encodes `numel` elements in `form` and decodes the same number. An element of a
/// narrow dtype takes as long as an element of fp32. It is 0 if `dtype` is sent unchanged.
double coding_seconds(const CodingFit& coding, WireForm form, DType dtype, std::int64_t numel);

/// Returns the cost of a call if a core of the rank spends `coding_s` seconds on writing and reading its messages.
/// Coding is done piece by piece, while other messages are on the wire. The call takes as long as the longer of coding
/// and sending.
CallCost with_coding(CallCost cost, double coding_s);

/// Returns the cost of an all-gather in `form`, in which each of `ranks` ranks sends `numel` elements.
CallCost all_gather_in(WireForm form, DType dtype, std::int64_t numel, const Links& links, int ranks);

}  // namespace tessera
