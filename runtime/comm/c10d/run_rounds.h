#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "runtime/comm/c10d/transfers.h"
#include "runtime/comm/rounds/round.h"
#include "tessera/dtype.h"

namespace tessera {

/// The memory that a call in rounds uses.
struct RoundBuffers {
  /// Index of each slice's first element, then the end of the last slice. There is one entry more than there are
  /// slices. Slices may be empty.
  std::vector<std::size_t> begins;
  /// Contributions, elements of `input_dtype` (fp32, bf16, fp16). They are not read if no message is a contribution.
  const std::byte* input = nullptr;
  DType input_dtype = DType::kF32;
  /// Received data and sums, elements of `result_dtype`, which is fp32 if rounds add. It may be `input` if dtypes are
  /// the same.
  std::byte* results = nullptr;
  DType result_dtype = DType::kF32;
  /// Scratch memory of received_bytes().
  std::byte* received = nullptr;
};

/// Returns the bytes of scratch that received data needs before it is added.
std::size_t received_bytes(const Rounds& rounds, const RoundBuffers& buffers);

/// Makes the rounds one after the other, and returns when the last one is over. Messages have `tag`; empty messages are
/// not sent. Throws the exceptions of Transfers::wait. REQUIRES: Means::kMessages; a round that adds receives one
/// message.
void run_rounds(c10d::Backend& backend, Transfers& transfers, int tag, const Rounds& rounds,
                const RoundBuffers& buffers);

}  // namespace tessera
