#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/engine.h"
#include "workshop/models/gpt.h"

namespace tessera::app {

/// A GPT with an Engine. Each of its steps has one sequence, which differs on each rank. Studies of whole steps train
/// this GPT. Sessions that are made with the same arguments have the same first values.
class GptSession {
 public:
  GptSession(const Mesh& mesh, const models::GPTConfig& config, const Strategy& strategy);

  Engine& engine() { return engine_; }
  /// Runs forward, and returns the loss.
  at::Tensor loss();

 private:
  models::GPT model_;
  Engine engine_;
  at::Tensor tokens_;
};

}  // namespace tessera::app
