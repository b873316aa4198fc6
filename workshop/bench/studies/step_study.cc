#include "workshop/bench/studies/step_study.h"

#include <cmath>
#include <optional>

#include "runtime/border/throw.h"
#include "runtime/comm/local/fake_mesh.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/engine.h"
#include "workshop/bench/studies/gpt_session.h"
#include "workshop/bench/studies/rank_samples.h"
#include "workshop/models/gpt.h"

namespace tessera::app {
namespace {

using Clock = SampleClock;

/// One contender in one round, with its own model, data and Engine.
class Trial {
 public:
  Trial(const Mesh& mesh, const Contender& contender, const models::GPTConfig& config)
      : session_(mesh, config, contender.strategy) {}

  /// Trains one step, and adds its times to `timing`. Returns its loss.
  double step(StepTiming& timing) {
    const Clock::time_point begin = Clock::now();
    const at::Tensor loss = session_.loss();
    const Clock::time_point forward = Clock::now();
    session_.engine().backward(loss);
    const Clock::time_point backward = Clock::now();
    const StepResult result = session_.engine().step();
    const Clock::time_point end = Clock::now();
    timing.step.ns.push_back(nanoseconds_between(begin, end));
    timing.forward.ns.push_back(nanoseconds_between(begin, forward));
    timing.backward.ns.push_back(nanoseconds_between(forward, backward));
    timing.update.ns.push_back(nanoseconds_between(backward, end));
    timing.communication.ns.push_back(static_cast<std::int64_t>(result.communication_seconds * 1e9));
    return result.loss;
  }

 private:
  GptSession session_;
};

void append(Samples& to, const Samples& from) { to.ns.insert(to.ns.end(), from.ns.begin(), from.ns.end()); }

}  // namespace

models::GPTConfig studied_gpt(bool small) {
  if (small) return {.vocab_size = 256, .seq_len = 32, .layers = 4, .width = 64, .heads = 4};
  return {.vocab_size = 8192, .seq_len = 64, .layers = 8, .width = 256, .heads = 8};
}

std::vector<Contender> contenders() {
  const auto under = [](ShardingStrategy kind) {
    Strategy strategy;
    strategy.strategy = kind;
    strategy.units.classes = {"Block"};
    return strategy;
  };
  std::vector<Contender> all = {{"no communication", under(ShardingStrategy::kNoShard), true}};
  for (const ShardingStrategy kind :
       {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer, ShardingStrategy::kShardGradients,
        ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard}) {
    all.push_back({std::string(name_of(kind)), under(kind)});
  }
  all.push_back({"FULL_SHARD, private copies", under(ShardingStrategy::kFullShard)});
  all.back().strategy.host_sharing = false;
  return all;
}

std::vector<StepTiming> study_steps(const Mesh& mesh, const StepStudyOptions& options) {
  const std::vector<Contender> all = contenders();
  const Mesh solo = fake_mesh(Topology{});
  const auto world = value_or_throw(groups_of(mesh).axes(1, mesh.world_size())).world;
  std::vector<StepTiming> timings(all.size());
  std::optional<std::vector<double>> expected;
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      throw_if_error(world->barrier("contender").wait());
      StepTiming warm_up, timing;
      std::vector<double> losses;
      {
        Trial trial(all[i].alone ? solo : mesh, all[i], options.model);
        for (int step = 0; step < options.warm_up + options.steps; ++step) {
          losses.push_back(trial.step(step < options.warm_up ? warm_up : timing));
        }
      }
      if (!all[i].alone && !expected) expected = losses;
      if (!all[i].alone && losses != *expected) {
        throw Error(ExitCode::kInternal, all[i].name + " gives other losses than " + all[1].name);
      }
      agree_on_samples(*world, timing.step, larger);
      timings[i].name = all[i].name;
      append(timings[i].step, timing.step);
      append(timings[i].forward, timing.forward);
      append(timings[i].backward, timing.backward);
      append(timings[i].update, timing.update);
      append(timings[i].communication, timing.communication);
    }
  }
  return timings;
}

BenchTable to_table(const std::vector<StepTiming>& timings) {
  BenchTable table{{"strategy", "median_s", "p10_s", "p90_s", "forward_s", "backward_s", "update_s", "communication_s",
                    "exposed_s", "exposed_fraction", "gustafson_efficiency"},
                   {}};
  const double alone = timings[0].step.median_s();
  for (const StepTiming& timing : timings) {
    const double median = timing.step.median_s();
    const bool compared = &timing != &timings[0];
    const auto cost = [&](double value) { return compared ? value : std::nan(""); };
    table.rows.push_back({timing.name, median, timing.step.quantile_s(0.1), timing.step.quantile_s(0.9),
                          timing.forward.median_s(), timing.backward.median_s(), timing.update.median_s(),
                          timing.communication.median_s(), cost(median - alone), cost((median - alone) / median),
                          cost(alone / median)});
  }
  return table;
}

}  // namespace tessera::app
