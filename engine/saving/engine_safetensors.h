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

/// Files that an Engine takes weights from: which they are, and how their names and the model's go together.
struct ImportedFiles {
  const char* call;  ///< whose they are: "load_weights"
  std::string path;
  MatchRules rules;
  /// Rank 0 alone calls it, with what the Engine wants.
  std::function<absl::StatusOr<std::unique_ptr<TensorSource>>(const std::vector<WantedTensor>& wanted)> open;
};

/// Weights into and out of an Engine, with its inside at hand: import_safetensors, export_safetensors, load_weights and
/// save_weights.
class EngineSafetensors {
 public:
  using State = Engine::State;
  explicit EngineSafetensors(Engine& engine) : engine_(engine), s_(*engine.state_) {}

  void import_from(const ImportedFiles& files);
  void export_to(const std::string& folder, const ExportOptions& options);
  void save(const std::filesystem::path& path, WeightsForm form, Existing existing);

 private:
  /// Throws tessera::Error (64) for a call out of turn. `what`: the call.
  void expect_between_steps(const char* what) const;

  Engine& engine_;
  State& s_;
};

/// Parameters and buffers of a module as they are wanted from files, each tensor once: `tensors[i]` wants `wanted[i]`.
struct ModuleTensors {
  std::vector<at::Tensor> tensors;
  std::vector<WantedTensor> wanted;
};
ModuleTensors wanted_by(const std::vector<std::pair<std::string, at::Tensor>>& named);

/// Parameters and defined buffers, a tied one under each of its names.
std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module);

/// Says what was loaded, where the files hold more than that.
void log_import(const std::string& path, std::size_t tensors, const std::string& unused);

}  // namespace tessera
