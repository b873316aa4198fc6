#include "tests/support/offloaded.h"

#include <filesystem>

#include "tessera/checkpoint.h"

namespace tessera::testing {

std::string name_of(const Kept& kept) {
  return std::string(tessera::name_of(kept.param)) + (kept.master == MasterKind::kF32 ? ", whole masters, " : ", ") +
         tessera::name_of(kept.state);
}

void put_below(Strategy& s, const Below& below) {
  const auto state = [](double fraction) {
    return fraction > 0 ? OffloadedState{Tier::kNvme, fraction} : OffloadedState{};
  };
  // If no share of the parameters is offloaded, their placement stays the same.
  if (below.parameters > 0) s.offload.parameters = state(below.parameters);
  s.offload.masters = state(below.masters);
  s.offload.moments = state(below.moments);
  s.offload.gradients = below.gradients ? Tier::kNvme : Tier::kMemory;
  s.offload.paths = {std::filesystem::temp_directory_path().string()};
  s.offload.record_bytes = below.record_bytes;
  s.offload.cache_bytes = below.cache_bytes;
  s.offload.queue_depth = below.queue_depth;
}

Adjust adjusted_to(const Kept& kept, const Below* below) {
  return [&kept, below](Strategy& s) {
    s.mixed_precision.master = kept.master;
    s.optimizer.state_dtype = kept.state;
    if (below) put_below(s, *below);
  };
}

Strategy strategy_of(const Kept& kept, const Placed& placed, const Below* below) {
  return strategy_for(placed, adjusted_to(kept, below), kept.param);
}

Values written_under_gathered(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy, kWide);
  for (std::size_t i = 0; i < 2; ++i) session.train(i);
  {
    Gathered guard(session.engine, Gathered::kWrite);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(1.001953125);
  }
  for (std::size_t i = 2; i < 4; ++i) session.train(i);
  return session.values();
}

Values trained_by_two_engines(const Mesh& mesh, const Strategy& strategy) {
  Tiny model = make_tiny(kWide, true);
  const std::vector<Batch> batches = make_batches(6, 24, 5, kWide.vocab);
  const auto train = [&](Engine& engine, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      engine.backward(model->forward(rows_of(batches[i].tokens, mesh), rows_of(batches[i].targets, mesh)));
      engine.step();
    }
  };
  {
    Engine first(model.ptr(), strategy, mesh);
    train(first, 0, 3);
  }
  Engine second(model.ptr(), strategy, mesh);
  train(second, 3, 6);
  const Gathered guard(second);
  return values_of(*model);
}

Values trained_with_weights_frozen_for_a_while(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy, kWide);
  for (std::size_t i = 0; i < 2; ++i) session.train(i);
  session.engine.set_trainable("*.weight", false);
  for (std::size_t i = 2; i < 4; ++i) session.train(i);
  session.engine.set_trainable("*.weight", true);
  for (std::size_t i = 4; i < 6; ++i) session.train(i);
  return session.values();
}

Values train_and_save(int ranks, const Placed& placed, const std::string& folder, std::size_t steps,
                      const Adjust& adjust) {
  return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(placed, adjust), kAwkward);
    std::size_t done = 0;
    if (std::filesystem::exists(folder)) done = static_cast<std::size_t>(load_checkpoint(session.engine, folder).step);
    for (std::size_t i = 0; i < steps; ++i) session.train(done + i);
    save_checkpoint(session.engine, folder);
    return session.values();
  });
}

}  // namespace tessera::testing
