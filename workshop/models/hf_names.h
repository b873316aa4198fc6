#pragma once

#include <string>
#include <vector>

#include "tessera/tensor_names.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

/// Returns the names that `transformers` uses for a model's tensors. Llama's tensors have these names already. Files of
/// GPT-2 store linear layers with rows and columns exchanged ("Conv1D"), and older files of GPT-2 lack the prefix
/// "transformer.". If the configuration ties the head to the token embedding, a file may contain the head as a copy of
/// the embedding. A file whose head has other values is refused.
TensorNames hf_names(const ModelConfig& config);

/// Returns patterns for tensors that files have and models of Tessera do not need: masks and frequencies, which are
/// computed.
std::vector<std::string> hf_ignored(const ModelConfig& config);

}  // namespace tessera::models
