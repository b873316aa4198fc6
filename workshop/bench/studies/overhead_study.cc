#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <torch/nn/module.h>

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "tessera/span.h"
#include "workshop/bench/samples.h"
#include "workshop/bench/studies/studies.h"
#include "workshop/models/gpt.h"

namespace tessera::app {
namespace {

constexpr int kUnits = 4, kManyUnits = 4000;
constexpr std::int64_t kNumel = 8;

struct Leaf : torch::nn::Module {
  Leaf() { weight = register_parameter("weight", at::ones({kNumel})); }
  at::Tensor weight;
};

/// A module of units with one small parameter each.
struct Leaves : torch::nn::Module {
  explicit Leaves(int units) {
    for (int i = 0; i < units; ++i) {
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

/// Returns the nanoseconds of all spans with this name since Trace::start.
std::int64_t traced_ns(const std::string& name) {
  double microseconds = 0;
  for (const auto& event : nlohmann::json::parse("[" + Trace::events_as_json(0) + "]")) {
    if (event.value("name", "") == name) microseconds += event.value("dur", 0.0);
  }
  return static_cast<std::int64_t>(microseconds * 1e3);
}

class OverheadStudy {
 public:
  OverheadStudy(const Mesh& mesh, int operators) : mesh_(mesh), operators_(operators) {}

  /// Times one case alone, since an Engine that gathers watches all operators of the process as long as it exists.
  void time(const std::string& name, const std::optional<Strategy>& strategy,
            const std::function<at::Tensor(const Leaves&, const at::Tensor&, int)>& op, int rounds) {
    const auto module = std::make_shared<Leaves>(kUnits);
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
    rows_.push_back({name, std::move(each), 0});
  }

  /// Times whole steps of a module of `units` units, whose parameters a step adds up. `plain_row` is the row with which
  /// the new row is compared. The plain row is compared with itself.
  void time_steps(const std::string& name, int units, const std::optional<Strategy>& strategy, int rounds,
                  std::size_t plain_row) {
    const auto module = std::make_shared<Leaves>(units);
    std::optional<Engine> engine;
    if (strategy) engine.emplace(std::static_pointer_cast<torch::nn::Module>(module), *strategy, mesh_);
    Samples each;
    for (int round = -2; round < rounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      at::Tensor x = at::ones({kNumel});
      for (const auto& leaf : module->leaves) x = at::add(x, leaf->weight);
      const at::Tensor loss = x.sum();
      if (engine) {
        engine->backward(loss);
        engine->step();
      } else {
        loss.backward();
        module->zero_grad();
      }
      const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin;
      if (round >= 0) each.ns.push_back(taken.count());
    }
    rows_.push_back({name, std::move(each), plain_row});
  }

  /// Times steps of a small GPT, and the part of a step in which the Engine checks the program's calls (the trace's
  /// spans "checks"). The function makes two rows: one for the step, and one for the checks.
  void time_checks(const models::GPTConfig& config, int rounds) {
    at::manual_seed(3);
    models::GPT model = deferred_init([&] { return models::GPT(config); });
    Strategy strategy;
    strategy.units.classes = {"Block"};
    Engine engine(model, strategy, mesh_);
    const at::Tensor tokens = at::randint(config.vocab_size, {1, config.seq_len + 1}, at::kLong);
    Samples steps, checks;
    for (int round = -2; round < rounds; ++round) {
      Trace::start();
      const auto begin = std::chrono::steady_clock::now();
      engine.backward(model->forward(tokens.narrow(1, 0, config.seq_len), tokens.narrow(1, 1, config.seq_len)));
      engine.step();
      const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin;
      Trace::stop();
      if (round < 0) continue;
      steps.ns.push_back(taken.count());
      checks.ns.push_back(traced_ns("checks"));
    }
    const std::string name = std::to_string(config.layers) + " layers of width " + std::to_string(config.width);
    rows_.push_back({name + ": a step", std::move(steps), rows_.size()});
    rows_.push_back({name + ": checks of the program in a step", std::move(checks), rows_.size()});
  }

  /// Times the updates in steps of a small GPT, alternately with all parameters in one group and with each parameter in
  /// its own group. The wait for other ranks' updates is not counted. The function makes two rows.
  void time_groups(const models::GPTConfig& config, int rounds) {
    struct Session {
      Session(const models::GPTConfig& config, const Mesh& mesh, bool has_groups)
          : model(deferred_init([&] { return models::GPT(config); })), engine(model, strategy(has_groups), mesh) {}
      Strategy strategy(bool has_groups) const {
        Strategy strategy;
        strategy.units.classes = {"Block"};
        if (!has_groups) return strategy;
        for (const auto& item : model->named_parameters()) strategy.optimizer.groups.push_back({.match = {item.key()}});
        return strategy;
      }
      models::GPT model;
      Engine engine;
      Samples updates = {};
    };
    at::manual_seed(3);
    Session sessions[] = {{config, mesh_, false}, {config, mesh_, true}};
    const at::Tensor tokens = at::randint(config.vocab_size, {1, config.seq_len + 1}, at::kLong);
    for (int round = -2; round < rounds; ++round) {
      for (Session& s : sessions) {
        s.engine.backward(s.model->forward(tokens.narrow(1, 0, config.seq_len), tokens.narrow(1, 1, config.seq_len)));
        Trace::start();
        s.engine.step();
        Trace::stop();
        if (round >= 0) s.updates.ns.push_back(traced_ns("update") - traced_ns("publish"));
      }
    }
    const std::string name = std::to_string(config.layers) + " layers of width " + std::to_string(config.width);
    const std::size_t plain = rows_.size();
    rows_.push_back({name + ": an update, all parameters alike", std::move(sessions[0].updates), plain});
    rows_.push_back({name + ": an update, a group for each parameter", std::move(sessions[1].updates), plain});
  }

  std::size_t rows() const { return rows_.size(); }

  BenchTable to_table() const {
    BenchTable table{{"operator", "median_s", "p10_s", "p90_s", "over_plain_s"}, {}};
    for (const Row& row : rows_) {
      const double median = row.samples.median_s();
      table.rows.push_back({row.name, median, row.samples.quantile_s(0.1), row.samples.quantile_s(0.9),
                            median - rows_[row.plain_row].samples.median_s()});
    }
    return table;
  }

 private:
  struct Row {
    std::string name;
    Samples samples;
    std::size_t plain_row;  ///< row with which this row is compared
  };

  const Mesh& mesh_;
  const int operators_;
  std::vector<Row> rows_;
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
  const models::GPTConfig small{.vocab_size = 256, .seq_len = 32, .layers = 24, .width = 64, .heads = 4};
  study.time_checks(small, operators < 1000 ? 2 : 30);
  study.time_groups(small, operators < 1000 ? 2 : 30);
  // These rows show how the time of a step grows with the number of units gathered ahead.
  const int units = operators < 1000 ? kManyUnits / 20 : kManyUnits, steps = rounds < 10 ? 2 : 11;
  const std::string many = " of " + std::to_string(units) + " units";
  const std::size_t plain = study.rows();
  study.time_steps("plain module, forward and backward" + many, units, std::nullopt, steps, plain);
  for (const int prefetch : {1, 256, 1024}) {
    const std::string name = "private copies, a step" + many + ", prefetch " + std::to_string(prefetch);
    study.time_steps(name, units, strategy_of(prefetch, false), steps, plain);
  }
  return study.to_table();
}

}  // namespace tessera::app
