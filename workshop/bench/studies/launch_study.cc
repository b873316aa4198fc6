#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine.h"
#include "tessera/init.h"
#include "workshop/bench/studies/rank_samples.h"
#include "workshop/bench/studies/studies.h"
#include "workshop/models/gpt.h"

namespace tessera::app {
namespace {

models::GPTConfig narrow(std::int64_t blocks) {
  return {.vocab_size = 256, .seq_len = 32, .layers = blocks, .width = 64, .heads = 1};
}

/// A step on `tokens`, [1, T + 1]. It returns the loss, which the device may still be computing.
using Step = std::function<at::Tensor(const at::Tensor& tokens)>;

at::Tensor loss_of(models::GPT& model, const at::Tensor& tokens) {
  const std::int64_t length = tokens.size(1) - 1;
  return model->forward(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length));
}

/// Returns a step of the module without an Engine, in bf16, as users would write it by hand.
Step plain(const models::GPTConfig& config, const at::Device& device) {
  struct State {
    models::GPT model{nullptr};
    std::vector<at::Tensor> parameters, masters, gradients, firsts, seconds, steps;
  };
  auto state = std::make_shared<State>();
  state->model = models::GPT(config);
  state->model->to(device);
  const at::NoGradGuard none;
  for (const at::Tensor& parameter : state->model->parameters()) {
    state->masters.push_back(parameter.detach().clone());
    state->gradients.push_back(at::zeros_like(parameter));
    state->firsts.push_back(at::zeros_like(parameter));
    state->seconds.push_back(at::zeros_like(parameter));
    state->steps.push_back(at::full({}, 0, parameter.options().requires_grad(false)));
  }
  state->model->to(at::kBFloat16);
  state->parameters = state->model->parameters();
  return [state](const at::Tensor& tokens) {
    State& s = *state;
    const at::Tensor loss = loss_of(s.model, tokens);
    loss.backward();
    const at::NoGradGuard none;
    std::vector<at::Tensor> arrived;
    for (const at::Tensor& parameter : s.parameters) arrived.push_back(parameter.grad());
    at::_foreach_copy_(s.gradients, arrived);
    at::_foreach_add_(s.steps, 1);
    at::_fused_adamw_(s.masters, s.gradients, s.firsts, s.seconds, {}, s.steps, 3e-4, 0.9, 0.999, 0.01, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    at::_foreach_copy_(s.parameters, s.masters);
    for (at::Tensor& parameter : s.parameters) parameter.mutable_grad().reset();
    return loss.detach();
  };
}

Step under(ShardingStrategy kind, const models::GPTConfig& config, bool on_gpu) {
  struct State {
    State(const models::GPTConfig& config, const Strategy& strategy)
        : model(config), engine(model, strategy, init(strategy.comm)) {}
    models::GPT model;
    Engine engine;
    std::optional<StepResult> last;
  };
  Strategy strategy;
  strategy.strategy = kind;
  strategy.units.classes = {"Block"};
  strategy.mixed_precision.param = DType::kBF16;
  if (on_gpu) strategy.comm.transport = TransportChoice::kNccl;
  auto state = std::make_shared<State>(config, strategy);
  return [state](const at::Tensor& tokens) {
    State& s = *state;
    const at::Tensor loss = loss_of(s.model, tokens);
    s.engine.backward(loss);
    StepResult result = s.engine.step();
    if (s.last) s.last->wait();  // like a training loop, this reads a result that is a step old, so the host runs ahead
    s.last = std::move(result);
    return loss.detach();
  };
}

}  // namespace

BenchTable study_launches(const LaunchStudyOptions& options) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // no thread is busy except the two that feed the GPU
  const models::GPTConfig config = narrow(options.blocks);
  const at::Device device = options.on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  struct Contender {
    std::string name;
    Step step;
    Samples samples = {};
  };
  std::vector<Contender> contenders;
  const auto add = [&](std::string name, const auto& make) {
    at::manual_seed(3);
    contenders.push_back({std::move(name), make()});
  };
  add("plain module", [&] { return plain(config, device); });
  for (const ShardingStrategy kind :
       {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard}) {
    add(std::string(name_of(kind)), [&] { return under(kind, config, options.on_gpu); });
  }
  const at::Tensor tokens = at::randint(config.vocab_size, {1, config.seq_len + 1}, at::kLong).to(device);
  const auto run = [&](const Step& step, int steps) {
    at::Tensor loss;
    for (int k = 0; k < steps; ++k) loss = step(tokens);
    return loss.item<float>();  // this waits for the device
  };
  for (const Contender& contender : contenders) run(contender.step, options.warm_up);
  for (int round = 0; round < options.rounds; ++round) {
    for (Contender& contender : contenders) {
      const SampleClock::time_point begin = SampleClock::now();
      run(contender.step, options.steps);
      contender.samples.ns.push_back(nanoseconds_since(begin) / options.steps);
    }
  }
  at::set_num_threads(threads);
  BenchTable table{{"contender", "step_s", "p10_s", "p90_s", "over_plain_s", "over_plain_unit_s",
                    "over_plain_unit_p10_s", "over_plain_unit_p90_s"},
                   {}};
  const Samples& plain_samples = contenders[0].samples;
  const auto units = static_cast<double>(options.blocks + 1);
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    const Samples& samples = contenders[i].samples;
    Samples over;
    for (std::size_t k = 0; k < samples.ns.size(); ++k) over.ns.push_back(samples.ns[k] - plain_samples.ns[k]);
    const auto cost = [&](double value) { return i == 0 ? std::nan("") : value; };
    table.rows.push_back({contenders[i].name, samples.median_s(), samples.quantile_s(0.1), samples.quantile_s(0.9),
                          cost(over.median_s()), cost(over.median_s() / units), cost(over.quantile_s(0.1) / units),
                          cost(over.quantile_s(0.9) / units)});
  }
  return table;
}

}  // namespace tessera::app
