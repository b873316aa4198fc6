#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/base/wire/sign_messages.h"

namespace tessera::cuda {

/// Writes the messages of `values` [how.numel] to `messages` [how.bytes()]. For each part it does the work of
/// cast_votes (kVotes) or of encode_signs (kScaled) in sign_codec.h. Under kScaled, `values` is the argument `more` of
/// encode_signs, and how.kept is its argument `values`. The bits are those of the CPU, except for the payloads of NaNs.
/// Messages and residuals may lie in the device's memory, or in pinned memory of the host. A launch has at most
/// `most_blocks` thread blocks. REQUIRES: numel < 2^39.
cudaError_t encode_sign_messages(const SignMessages& how, const float* values, std::uint32_t* messages,
                                 unsigned most_blocks, cudaStream_t stream);

}  // namespace tessera::cuda
