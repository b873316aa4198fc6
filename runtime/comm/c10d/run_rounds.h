#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "runtime/comm/c10d/transfers.h"
#include "runtime/comm/rounds/round.h"
#include "tessera/dtype.h"

namespace tessera {

/// Memory of a call in rounds.
struct RoundBuffers {
  /// The element where each slice begins, and where the last one ends: one more than there are slices. Slices may be empty.
  std::vector<std::size_t> begins;
  /// Contributions, elements of `input_dtype` (fp32, bf16, fp16); not looked at where no message is a contribution.
  const std::byte* input = nullptr;
  DType input_dtype = DType::kF32;
  /// What is received and what sums are: elements of `result_dtype`, fp32 where rounds add. May be `input` where dtypes are the same.
  std::byte* results = nullptr;
  DType result_dtype = DType::kF32;
  /// Of received_bytes.
  std::byte* received = nullptr;
};

/// Bytes that must be there for what is received to be added.
std::size_t received_bytes(const Rounds& rounds, const RoundBuffers& buffers);

/// Makes the rounds, one after the other, and returns when the last one is over. Messages have `tag`; those of no bytes are not sent.
/// Throws as Transfers::wait. REQUIRES: messages as means; a round that adds receives one message.
void run_rounds(c10d::Backend& backend, Transfers& transfers, int tag, const Rounds& rounds,
                const RoundBuffers& buffers);

}  // namespace tessera
