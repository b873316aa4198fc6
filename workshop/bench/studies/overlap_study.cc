#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/local/fake_mesh.h"
#include "tessera/collectives.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "workshop/bench/samples.h"
#include "workshop/bench/studies/studies.h"

namespace tessera::app {
namespace {

using Clock = std::chrono::steady_clock;

/// The computation of a unit. The computation returns its input after a while; backward takes twice as long as forward.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double seconds) {
    context->saved_data["seconds"] = seconds;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(std::chrono::duration<double>(2 * context->saved_data["seconds"].toDouble()));
    return {gradients[0], at::Tensor()};
  }
};

/// A unit whose gradient arrives when its backward computation has ended.
struct Timed : torch::nn::Module {
  explicit Timed(std::int64_t numel) { weight = register_parameter("weight", at::zeros({numel})); }
  at::Tensor forward(const at::Tensor& x, double seconds) { return Sleep::apply(x + weight.sum(), seconds); }
  at::Tensor weight;
};

struct TimedUnits : torch::nn::Module {
  TimedUnits(int units, std::int64_t numel) {
    for (int i = 0; i < units; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Timed>(numel)));
    }
  }
  at::Tensor forward(double seconds_a_unit) {
    at::Tensor x = at::zeros({1});
    for (const auto& layer : layers) x = layer->forward(x, seconds_a_unit);
    return x.sum();
  }
  std::vector<std::shared_ptr<Timed>> layers;
};

/// A row of the table.
struct Case {
  ShardingStrategy strategy;
  std::optional<std::int64_t> reductions_ahead;

  std::string name() const {
    return name_of(strategy) + (reductions_ahead ? ", reductions_ahead " + std::to_string(*reductions_ahead) : "");
  }
};
const Case kCases[] = {{ShardingStrategy::kNoShard, {}},        {ShardingStrategy::kNoShard, 0},
                       {ShardingStrategy::kShardOptimizer, {}}, {ShardingStrategy::kShardGradients, {}},
                       {ShardingStrategy::kFullShard, {}},      {ShardingStrategy::kFullShard, 0}};

Strategy strategy_of(const Case& studied) {
  Strategy strategy;
  strategy.strategy = studied.strategy;
  strategy.reductions_ahead = studied.reductions_ahead;
  strategy.units.classes = {"Timed"};
  strategy.optimizer.type = OptimizerType::kSgd;  // the update then takes little time, even on a single rank
  strategy.optimizer.momentum = 0;
  strategy.optimizer.lr = 1e-3;
  return strategy;
}

/// A model that trains on a mesh.
struct Trained {
  Trained(const Mesh& mesh, const Case& studied, const OverlapStudyOptions& options)
      : module(deferred_init([&] { return std::make_shared<TimedUnits>(options.units, options.unit_numel); })),
        engine(std::static_pointer_cast<torch::nn::Module>(module), strategy_of(studied), mesh) {}

  std::int64_t step_ns(double seconds_a_unit) {
    const auto begin = Clock::now();
    engine.backward(module->forward(seconds_a_unit));
    engine.step();
    return std::chrono::nanoseconds(Clock::now() - begin).count();
  }

  std::shared_ptr<TimedUnits> module;
  Engine engine;
};

}  // namespace

BenchTable study_overlap(const Mesh& mesh, const OverlapStudyOptions& options) {
  const double seconds_a_unit = options.compute_s / options.units / 3;
  const Mesh alone = fake_mesh(Topology{});
  BenchTable table{{"strategy", "compute_s", "wire_s", "exposed_s", "exposed_over_wire", "step_s", "step_p10_s",
                    "step_p90_s", "bare_step_s", "alone_step_s", "alone_bare_step_s"},
                   {}};
  for (const Case& studied : kCases) {
    Trained with_peers(mesh, studied, options), by_itself(alone, {ShardingStrategy::kNoShard, {}}, options);
    Samples step, bare, alone_step, alone_bare;
    for (int round = -2; round < options.rounds; ++round) {
      barrier(mesh);
      const std::int64_t taken[] = {with_peers.step_ns(seconds_a_unit), with_peers.step_ns(0),
                                    by_itself.step_ns(seconds_a_unit), by_itself.step_ns(0)};
      if (round < 0) continue;
      Samples* const samples[] = {&step, &bare, &alone_step, &alone_bare};
      for (int i = 0; i < 4; ++i) samples[i]->ns.push_back(taken[i]);
    }
    const double wire = bare.median_s() - alone_bare.median_s(), exposed = step.median_s() - alone_step.median_s();
    table.rows.push_back({studied.name(), options.compute_s, wire, exposed, exposed / wire, step.median_s(),
                          step.quantile_s(0.1), step.quantile_s(0.9), bare.median_s(), alone_step.median_s(),
                          alone_bare.median_s()});
  }
  return table;
}

}  // namespace tessera::app
