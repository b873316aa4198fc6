#pragma once

#include <string>
#include <vector>

#include "tessera/tensor_names.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

/// Returns the names that `transformers` has for a model's tensors. Llama's tensors have these names already. GPT-2's
/// linear layers are stored with rows and columns exchanged there ("Conv1D"), and older files of it leave out the
/// prefix "transformer.". A file may hold a copy of the token embedding as the head, if the configuration ties the two:
/// a file whose head has other values is refused.
TensorNames hf_names(const ModelConfig& config);

/// Returns patterns of tensors that files have and models here do not need: masks and frequencies, which are computed.
std::vector<std::string> hf_ignored(const ModelConfig& config);

}  // namespace tessera::models
