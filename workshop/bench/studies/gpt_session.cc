#include "workshop/bench/studies/gpt_session.h"

#include <ATen/Context.h>
#include <ATen/ops/randint.h>

#include <cstdint>

#include "tessera/deferred_init.h"

namespace tessera::app {
namespace {

models::GPT make_model(const models::GPTConfig& config) {
  at::manual_seed(3);
  return deferred_init([&] { return models::GPT(config); });
}

}  // namespace

GptSession::GptSession(const Mesh& mesh, const models::GPTConfig& config, const Strategy& strategy)
    : model_(make_model(config)), engine_(model_, strategy, mesh) {
  at::manual_seed(17 + static_cast<std::uint64_t>(mesh.rank()));
  tokens_ = at::randint(config.vocab_size, {1, config.seq_len + 1}, at::kLong);
}

at::Tensor GptSession::loss() {
  const std::int64_t length = tokens_.size(1) - 1;
  return model_->forward(tokens_.narrow(1, 0, length), tokens_.narrow(1, 1, length));
}

}  // namespace tessera::app
