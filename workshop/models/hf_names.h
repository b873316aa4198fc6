#pragma once

#include <string>
#include <vector>

#include "tessera/tensor_names.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

/// What `transformers` calls a model's tensors. Llama's have its names already. GPT-2's linear layers lie there with
/// rows and columns exchanged ("Conv1D"), and older files of it leave out the prefix "transformer.". A head that the configuration ties to
/// the token embedding is a copy of that: a file that has it with other values is refused.
TensorNames hf_names(const ModelConfig& config);

/// Tensors that files have and models here do not need: masks and frequencies, which are computed. Patterns.
std::vector<std::string> hf_ignored(const ModelConfig& config);

}  // namespace tessera::models
