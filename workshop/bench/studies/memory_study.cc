#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <malloc.h>

#include <fstream>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "workshop/bench/studies/step_study.h"
#include "workshop/bench/studies/studies.h"
#include "workshop/models/gpt.h"

namespace tessera::app {
namespace {

/// Returns the anonymous and shared memory for which the kernel charges this process, without malloc's free memory.
std::int64_t charged_bytes() {
  malloc_trim(0);
  std::ifstream file("/proc/self/smaps_rollup");
  std::int64_t total = 0;
  for (std::string line; std::getline(file, line);) {
    for (const char* name : {"Pss_Anon:", "Pss_Shmem:"}) {
      if (line.starts_with(name)) total += std::stoll(line.substr(std::string(name).size())) * 1024;
    }
  }
  if (total == 0) throw Error(ExitCode::kUnavailable, "/proc/self/smaps_rollup does not say what this process uses");
  return total;
}

/// Returns the number of sharded bytes among the 16 bytes of a parameter (4 for the parameter, 4 for its gradient, 8
/// for the moments).
double sharded_bytes(ShardingStrategy kind) {
  switch (kind) {
    case ShardingStrategy::kNoShard:
      return 0;
    case ShardingStrategy::kShardOptimizer:
      return 8;
    case ShardingStrategy::kShardGradients:
    case ShardingStrategy::kShardGradOp:
      return 12;
    case ShardingStrategy::kFullShard:
    case ShardingStrategy::kHybridShard:
      return 16;
  }
  return 0;
}

struct Measured {
  std::int64_t planned = 0, allocated = 0, charged = 0;
};

Measured measure(const Mesh& mesh, Collectives& world, const Strategy& strategy, const models::GPTConfig& config) {
  const std::int64_t before = charged_bytes();
  at::manual_seed(3);
  models::GPT model = deferred_init([&] { return models::GPT(config); });
  Engine engine(model, strategy, mesh);
  const at::Tensor tokens = at::randint(config.vocab_size, {1, config.seq_len}, at::kLong);
  for (int step = 0; step < 3; ++step) {
    engine.backward(model->forward(tokens, tokens));
    engine.step();
  }
  Measured measured{engine.plan().use.total(), engine.allocated().total(), 0};
  throw_if_error(world.barrier("trained").wait());
  measured.charged = charged_bytes() - before;
  throw_if_error(world.barrier("measured").wait());
  return measured;
}

}  // namespace

BenchTable study_memory(const Mesh& mesh, const models::GPTConfig& config) {
  BenchTable table{
      {"strategy", "planned_bytes", "allocated_bytes", "measured_bytes", "measured_over_plan", "formula_bytes"}, {}};
  const auto world = value_or_throw(groups_of(mesh).axes(1, mesh.world_size())).world;
  const auto parameters = static_cast<double>(models::parameter_count(config));
  for (const Contender& contender : contenders()) {
    if (contender.alone) continue;
    if (table.rows.empty()) measure(mesh, *world, contender.strategy, config);  // libraries allocate memory at first
    const double sharded = sharded_bytes(contender.strategy.strategy);
    const Measured measured = measure(mesh, *world, contender.strategy, config);
    const auto planned = static_cast<double>(measured.planned), charged = static_cast<double>(measured.charged);
    table.rows.push_back({contender.name, planned, static_cast<double>(measured.allocated), charged, charged / planned,
                          (16 - sharded + sharded / mesh.world_size()) * parameters});
  }
  return table;
}

}  // namespace tessera::app
