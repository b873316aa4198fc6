#include "benchmarks/native/studies/overhead_study.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "benchmarks/native/samples.h"
#include "tessera/engine.h"

namespace tessera::app {
namespace {

constexpr int kUnits = 4;
constexpr std::int64_t kNumel = 8;

struct Leaf : torch::nn::Module {
  Leaf() { weight = register_parameter("weight", at::ones({kNumel})); }
  at::Tensor weight;
};

/// Four units of one small parameter each.
struct Leaves : torch::nn::Module {
  Leaves() {
    for (int i = 0; i < kUnits; ++i) {
      leaves.push_back(register_module("leaf" + std::to_string(i), std::make_shared<Leaf>()));
    }
  }
  std::vector<std::shared_ptr<Leaf>> leaves;
};

Strategy strategy_of(std::int64_t prefetch, bool host_sharing) {
  Strategy strategy;
  strategy.strategy = ShardingStrategy::kFullShard;
  strategy.units.classes = {"Leaf"};
  strategy.prefetch = prefetch;
  strategy.host_sharing = host_sharing;
  return strategy;
}

class OverheadStudy {
 public:
  OverheadStudy(const Mesh& mesh, int operators) : mesh_(mesh), operators_(operators) {}

  /// Times one case by itself: while an Engine that gathers lives, all operators of the process are watched.
  void time(const std::string& name, const std::optional<Strategy>& strategy,
            const std::function<at::Tensor(const Leaves&, const at::Tensor&, int)>& op, int rounds) {
    const auto module = std::make_shared<Leaves>();
    std::optional<Engine> engine;
    if (strategy) engine.emplace(std::static_pointer_cast<torch::nn::Module>(module), *strategy, mesh_);
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::ones({kNumel});
    Samples each;
    for (int round = -2; round < rounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < operators_; ++i) op(*module, x, i);
      const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin;
      if (round >= 0) each.ns.push_back(taken.count() / operators_);
    }
    samples_.emplace_back(name, std::move(each));
  }

  BenchTable to_table() const {
    BenchTable table{{"operator", "median_s", "p10_s", "p90_s", "over_plain_s"}, {}};
    const double plain = samples_[0].second.median_s();
    for (const auto& [name, each] : samples_) {
      const double median = each.median_s();
      table.rows.push_back({name, median, each.quantile_s(0.1), each.quantile_s(0.9), median - plain});
    }
    return table;
  }

 private:
  const Mesh& mesh_;
  const int operators_;
  std::vector<std::pair<std::string, Samples>> samples_;
};

}  // namespace

BenchTable study_overhead(const Mesh& mesh, int rounds, int operators) {
  const auto other = [](const Leaves&, const at::Tensor& x, int) { return at::add(x, x); };
  const auto in_turns = [](int units) {
    return [units](const Leaves& module, const at::Tensor& x, int i) {
      return at::add(x, module.leaves[static_cast<std::size_t>(i % units)]->weight);
    };
  };
  const auto same = in_turns(1), two = in_turns(2), all = in_turns(kUnits);
  OverheadStudy study(mesh, operators);
  study.time("plain module", std::nullopt, same, rounds);
  study.time("one copy for all ranks (host_sharing): nothing is watched", strategy_of(1, true), same, rounds);
  study.time("private copies, no parameter among the inputs", strategy_of(1, false), other, rounds);
  study.time("private copies, the same unit as before", strategy_of(1, false), same, rounds);
  study.time("private copies, another unit, gathered before", strategy_of(1, false), two, rounds);
  study.time("private copies, a unit that must be gathered", strategy_of(0, false), all, rounds);
  return study.to_table();
}

}  // namespace tessera::app
