#pragma once

#include <optional>
#include <string>

#include "engine/engine_state.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// save_checkpoint and load_checkpoint, with the Engine's inside at hand.
class EngineCheckpoints {
 public:
  using State = Engine::State;
  explicit EngineCheckpoints(Engine& engine) : s_(*engine.state_) {}

  std::string save(const std::string& folder, const CheckpointItems& items, const SaveOptions& options);
  LoadedCheckpoint load(const std::string& path);
  void finish();
  std::optional<CheckpointProgress> progress() const;

 private:
  Engine::State& s_;
};

}  // namespace tessera
