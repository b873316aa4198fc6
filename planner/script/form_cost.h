#pragma once

#include <cstdint>

#include "planner/measured/links.h"
#include "tessera/dtype.h"

namespace tessera {

/// Returns the number of bytes of `numel` elements on the wire, with the codec `form`, or unchanged in `dtype`. Lossy
/// codecs (runtime/comm/sum/wire_codec.h) send an fp32 scale for every 256 elements, and a byte or half a byte for each
/// element, rounded up to a multiple of 4. The size with the lossless codec (lossless.h) is that of normally
/// distributed values: 0.853 of fp32's bytes, and 0.70 of bf16's. The model ignores that short messages are not
/// compressed.
std::int64_t bytes_on_wire(WireForm form, DType dtype, std::int64_t numel);

/// Returns the seconds in which a core encodes `numel` elements in `form` and decodes the same number. An element of a
/// 16-bit dtype takes as long as an element of fp32. The result is 0 if `dtype` is sent unchanged.
double coding_seconds(const CodingFit& coding, WireForm form, DType dtype, std::int64_t numel);

/// Returns the cost of a call if a core of the rank spends `coding_s` seconds on writing and reading its messages.
/// Coding is done piece by piece, while other messages are on the wire. So the call takes as long as coding or sending,
/// whichever takes longer.
CallCost with_coding(CallCost cost, double coding_s);

/// Returns the cost of an all-gather in `form`, in which each of `ranks` ranks sends `numel` elements.
CallCost all_gather_in(WireForm form, DType dtype, std::int64_t numel, const Links& links, int ranks);

}  // namespace tessera
