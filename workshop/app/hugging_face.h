#pragma once

#include <absl/status/status.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "tessera/engine.h"
#include "tessera/existing.h"
#include "tessera/mesh.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// Gives an Engine's model, or a module, the weights of a folder or file of Hugging Face. Throws the errors of
/// import_safetensors (tessera/safetensors.h).
void import_hf(Engine& engine, const std::filesystem::path& path, const models::ModelConfig& config);
void import_hf(torch::nn::Module& module, const std::filesystem::path& path, const models::ModelConfig& config);

/// Writes weights and config.json into `folder`, in the form that transformers' `from_pretrained` reads. The weights
/// have the types in which the Engine computes. The call is collective. Throws the errors of export_safetensors, and 78
/// if Hugging Face has no such model.
void export_hf(Engine& engine, const Mesh& mesh, const std::filesystem::path& folder, const models::ModelConfig& config,
               Existing existing);

/// Writes config.json. `dtype` is the type of the weights beside it: "fp32", "bf16" or "fp16". Errors: 78 if Hugging
/// Face has no such model; 73 if the file cannot be created, 77 if permission is missing, 74 if it cannot be written.
absl::Status write_hf_config(const std::filesystem::path& folder, const models::ModelConfig& config,
                             std::string_view dtype, Existing existing);

}  // namespace tessera::app
