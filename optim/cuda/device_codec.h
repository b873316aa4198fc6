#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "optim/arithmetic/encoded_parts.h"

namespace tessera::cuda {

// These are the codecs of the wire for a GPU. They give the same bits as tessera::encode and tessera::decode
// (wire_codec.h) on the CPU, except for the payloads of NaNs. Messages and residuals may lie in the device's memory, or
// in pinned memory of the host, which a kernel reads and writes over the bus. A launch has at most `most_blocks` thread
// blocks. REQUIRES: parts.blocks() < 2^31.

/// The number of thread blocks of a launch that moves its messages over the bus. A few thread blocks are enough to keep
/// the bus busy, so most of the GPU is left for the work on other streams.
inline constexpr unsigned kCodecBlocksOverBus = 32;

/// Encodes the parts `values` into `messages` [parts.bytes()], which is aligned to 4 bytes. `residual` holds fp32
/// numbers, in the order of the values, unless it is null: they are added to the values first, and are then replaced by
/// the rounding errors. Blocks with values that are not finite do not change `residual`.
cudaError_t encode_parts(const EncodedParts& parts, const void* values, float* residual, std::byte* messages,
                         unsigned most_blocks, cudaStream_t stream);

/// Reverses encode_parts, without a residual.
cudaError_t decode_parts(const EncodedParts& parts, const std::byte* messages, void* values, unsigned most_blocks,
                         cudaStream_t stream);

}  // namespace tessera::cuda
