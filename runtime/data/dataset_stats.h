#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <span>

#include "runtime/data/token_dataset.h"

namespace tessera {

/// Checks tokens. Error: 65 for the first of `tokens` outside of [0, vocab_size). The message has the file and the
/// offset of this token. `begin` is the position of tokens[0] in the dataset.
absl::Status check_tokens(const TokenDataset& dataset, std::int64_t begin, std::span<const std::int64_t> tokens,
                          std::int64_t vocab_size);

/// Returns the entropy of the tokens' frequencies, in nats per token: -sum p ln p. It is the loss of the best model
/// that knows how often each token occurs, and nothing about its neighbours. A model whose loss falls below this
/// entropy has therefore learnt from context. The function reads the whole dataset once.
absl::StatusOr<double> unigram_entropy(const TokenDataset& dataset);

}  // namespace tessera
