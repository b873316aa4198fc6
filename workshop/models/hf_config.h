#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "workshop/models/model_config.h"

namespace tessera::models {

/// Models of Hugging Face: a folder with `config.json`, whose keys are those of `transformers`, and weights in
/// safetensors.
///
/// | model_type | becomes                                                                          |
/// |------------|----------------------------------------------------------------------------------|
/// | gpt2       | GPTConfig                                                                        |
/// | llama      | LlamaConfig                                                                      |
/// | mistral    | LlamaConfig with sliding_window                                                  |
/// | qwen2      | LlamaConfig with qkv_bias, and sliding_window if use_sliding_window is set       |
/// | qwen3      | LlamaConfig with qk_norm, and sliding_window if use_sliding_window is set        |
///
/// A key that affects the computation of a model is either understood or refused. Unknown keys are left out, and
/// `unknown` names them.
struct HfConfig {
  ModelConfig config;
  std::vector<std::string> unknown;
};

/// Reads `folder`/config.json. If there are errors, the status lists all of them, with exit code 78. If the file cannot
/// be read: 66 if it is missing, 77 if permission is missing, 65 if it is no regular file.
absl::StatusOr<ModelConfig> read_hf_config(const std::filesystem::path& folder);
/// Reads a text; `name` stands for the file in messages.
absl::StatusOr<HfConfig> parse_hf_config(const std::string& text, const std::string& name = "config.json");

/// Returns the config.json with which `transformers` computes the same as the model. `torch_dtype` is the type of the
/// model's weights, such as "float32". The function fails with error 78 if none of the five model types computes the
/// same.
absl::StatusOr<std::string> to_hf_config(const ModelConfig& config, const std::string& torch_dtype);

}  // namespace tessera::models
