#pragma once

#include <string>

#include "engine/engine_state.h"
#include "tessera/safetensors.h"

namespace tessera {

/// import_safetensors and export_safetensors, with the Engine's inside at hand.
class EngineSafetensors {
 public:
  using State = Engine::State;
  explicit EngineSafetensors(Engine& engine) : engine_(engine), s_(*engine.state_) {}

  void import_from(const std::string& path, const ImportOptions& options);
  void export_to(const std::string& folder, const ExportOptions& options);

 private:
  /// Throws tessera::Error (64) for a call out of turn. `what`: the call.
  void expect_between_steps(const char* what) const;

  Engine& engine_;
  State& s_;
};

}  // namespace tessera
