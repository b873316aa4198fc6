#include "workshop/app/hugging_face.h"

#include "runtime/border/throw.h"
#include "tessera/dtype.h"
#include "tessera/safetensors.h"
#include "workshop/app/output_files.h"
#include "workshop/models/hf_config.h"
#include "workshop/models/hf_names.h"

namespace tessera::app {
namespace {

ImportOptions options_for(const models::ModelConfig& config) {
  return {.names = models::hf_names(config), .ignored = models::hf_ignored(config)};
}

/// Returns the name that transformers uses for the type.
std::string torch_name(std::string_view dtype) {
  if (dtype == "bf16") return "bfloat16";
  return dtype == "fp16" ? "float16" : "float32";
}

}  // namespace

void import_hf(Engine& engine, const std::filesystem::path& path, const models::ModelConfig& config) {
  import_safetensors(engine, path, options_for(config));
}

void import_hf(torch::nn::Module& module, const std::filesystem::path& path, const models::ModelConfig& config) {
  import_safetensors(module, path, options_for(config));
}

absl::Status write_hf_config(const std::filesystem::path& folder, const models::ModelConfig& config,
                             std::string_view dtype, Existing existing) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, models::to_hf_config(config, torch_name(dtype)));
  return write_output(folder / "config.json", text, existing, "config.json");
}

void export_hf(Engine& engine, const Mesh& mesh, const std::filesystem::path& folder, const models::ModelConfig& config,
               Existing existing) {
  export_safetensors(engine, folder, {.names = models::hf_names(config), .existing = existing});
  if (mesh.is_main())
    throw_if_error(write_hf_config(folder, config, name_of(engine.strategy().mixed_precision.param), existing));
}

}  // namespace tessera::app
