#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/weights/matched_tensors.h"
#include "engine/weights/tensor_source.h"
#include "tessera/safetensors.h"
#include "tessera/weights.h"

namespace tessera {

/// Files from which an Engine takes weights, with the rules that match the files' tensor names to the model's names.
struct ImportedFiles {
  const char* call;  ///< the program's call, for messages: "load_weights"
  std::string path;
  MatchRules rules;
  /// Opens the files. Only rank 0 calls this function, with the tensors that the Engine wants.
  std::function<absl::StatusOr<std::unique_ptr<TensorSource>>(const std::vector<WantedTensor>& wanted)> open;
};

/// Moves weights into and out of an Engine, and has access to its internals. It implements import_safetensors,
/// export_safetensors, load_weights and save_weights. All calls are collective over the Engine's ranks, and only the
/// Engine's thread makes them. Throws tessera::Error, the same on every rank: 64 for a call between backward and step,
/// or under a guard; 65 if files do not fit; and the errors of reading and writing.
class EngineSafetensors {
 public:
  explicit EngineSafetensors(Engine& engine) : engine_(engine), training_(engine.state_->training) {}

  /// Reads `files` on rank 0 and gives their values to all ranks.
  void import_from(const ImportedFiles& files);
  /// Writes all parameters and buffers as safetensors files in `folder`, from rank 0.
  void export_to(const std::string& folder, const ExportOptions& options);
  /// Writes all parameters and buffers to one file in a format of PyTorch, from rank 0.
  void save(const std::filesystem::path& path, WeightsForm form, Existing existing);

 private:
  /// Throws tessera::Error (64) for a call between backward and step, or under a guard. `what`: the name of the call.
  void expect_between_steps(const char* what) const;

  Engine& engine_;
  Training& training_;
};

/// The parameters and buffers of a module that get values from files, each tensor once: `wanted[i]` describes
/// `tensors[i]`.
struct ModuleTensors {
  std::vector<at::Tensor> tensors;
  std::vector<WantedTensor> wanted;
};
/// Makes a ModuleTensors from named tensors; if a tensor has several names, the further names become its aliases.
ModuleTensors wanted_by(const std::vector<std::pair<std::string, at::Tensor>>& named);

/// Returns the parameters and defined buffers of a module. A tied tensor is listed under each of its names.
std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module);

/// Logs how many tensors were loaded, and which tensors of the files were not used.
void log_import(const std::string& path, std::size_t tensors, const std::string& unused);

}  // namespace tessera
