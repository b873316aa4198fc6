#include "engine/step/rules/own_optimizer.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <string>

#include "checkpoint/saved_checkpoint.h"
#include "optim/master_assigner.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/config/optimizer_rows.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kWholeVectors = 32;  // a multiple of the number of elements that LibTorch computes at a time

float* state_of(const OptimizerSlice& slice, std::size_t state) {
  return reinterpret_cast<float*>(slice.states[state].data.data());
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config, const EmaConfig& ema,
                                          const OwnRules& own_rules) {
  const auto expect_rule = [&](OptimizerType type, bool has_rule, const Phrase& bring) {
    const bool wants = config.type == type;
    expect(!wants || has_rule, "optimizer.type is ", name_of(type),
           ", and the program brings no rule. [T0288] hint: ", bring, ", or name a type that is there");
    expect(wants || !has_rule, "the program brings a rule of its own, and optimizer.type is ", name_of(config.type),
           ". [T0289] hint: set \"optimizer\": {\"type\": \"", name_of(type), "\"}");
  };
  expect_rule(OptimizerType::kOwn, own_rules.elements != nullptr, phrases::kBringElements);
  expect_rule(OptimizerType::kOwnMatrix, own_rules.matrices != nullptr, phrases::kBringMatrices);
  if (has(config.type, optimizer_traits::kTensors)) return std::make_unique<MasterAssigner>(config, ema);
  if (config.type != OptimizerType::kOwn) return make_optimizer(config, ema);
  return std::make_unique<OwnOptimizer>(own_rules.elements, config, ema);
}

OwnOptimizer::OwnOptimizer(std::shared_ptr<const ElementwiseOptimizer> rule, const OptimizerConfig& config,
                           const EmaConfig& ema)
    : rule_(std::move(rule)),
      weight_decay_(config.weight_decay),
      bare_(sgd_without_states(config), ema),
      loops_(step_loops(best_instruction_set())) {
  std::set<std::string> names;
  for (const std::string& name : rule_->states()) {
    expect(is_name_of_state(name) && names.insert(name).second, "ElementwiseOptimizer::states: \"", name,
           "\" is no name for a state. [T0290] hint: give each a name of its own, without '|' and '.', and none that "
           "checkpoints use: ema, master, value, buffer, item, generator, gpu_generator, factors, outer_momentum");
    states_.push_back({name, StateDType::kF32});
  }
  own_states_ = states_.size();
  expect(own_states_ <= ElementwiseOptimizer::kMostStates, "ElementwiseOptimizer::states: at most ",
         ElementwiseOptimizer::kMostStates, " states, got ", own_states_,
         ". [T0291] hint: join states that change together into one");
  for (const StateInfo& average : bare_.states()) states_.push_back(average);
}

OptimizerSlice OwnOptimizer::without_states(const OptimizerSlice& slice) const {
  OptimizerSlice bare = slice;
  bare.states = {};
  if (states_.size() > own_states_) bare.states[0] = slice.states[own_states_];
  return bare;
}

void OwnOptimizer::average(const OptimizerSlice& slice) const { bare_.average(without_states(slice)); }
void OwnOptimizer::swap_average(const OptimizerSlice& slice) const { bare_.swap_average(without_states(slice)); }

void OwnOptimizer::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  const Unrecorded unrecorded;
  const std::size_t numel = slice.gradient.size(), whole = numel / kWholeVectors * kWholeVectors;
  StepArguments arguments = bare_.arguments(without_states(slice));
  arguments.average.start = average_start(scalars.step, scalars.is_first_of_run);
  const auto update = [&](std::size_t begin, std::size_t count) {
    this->update(scalars, slice, begin, part_of(arguments, begin, count));
  };
  for (std::size_t begin = 0; begin < whole; begin += ElementwiseOptimizer::kMostElements) {
    update(begin, std::min<std::size_t>(whole - begin, ElementwiseOptimizer::kMostElements));
  }
  if (whole < numel) update(whole, numel - whole);
}

void OwnOptimizer::update(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin,
                          StepArguments a) const {
  const at::Tensor parameters = at::zeros({static_cast<std::int64_t>(filled_up(a.numel))});
  loops_.read_weights(a, parameters.data_ptr<float>());
  const at::Tensor masters = updated(scalars, slice, begin, a.numel, parameters);
  a.gradient = masters.data_ptr<float>();
  loops_.assign_weights(a);
}

std::size_t OwnOptimizer::filled_up(std::size_t count) {
  return (count + kWholeVectors - 1) / kWholeVectors * kWholeVectors;
}

at::Tensor OwnOptimizer::updated(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin,
                                 std::size_t count, const at::Tensor& parameters) const {
  const std::int64_t numel = parameters.numel();
  const auto own = static_cast<std::int64_t>(count);
  const auto view_of = [&](const float* values) {
    return at::from_blob(const_cast<float*>(values), {own}, parameters.options());
  };
  ElementwiseOptimizer::Elements e;
  e.parameters = parameters;
  e.gradient = at::zeros({numel}, parameters.options());
  e.gradient.narrow(0, 0, own).copy_(view_of(slice.gradient.data() + begin)).mul_(scalars.gradient_scale);
  if (scalars.clip_value > 0) e.gradient.clamp_(-scalars.clip_value, scalars.clip_value);
  for (std::size_t i = 0; i < own_states_; ++i) {
    const at::Tensor state = view_of(state_of(slice, i) + begin);
    e.states.push_back(numel == own ? state : at::constant_pad_nd(state, {0, numel - own}));
  }
  e.lr = scalars.lr;
  e.weight_decay = weight_decay_;
  e.step = scalars.step;
  const std::vector<at::Tensor> states = e.states;
  rule_->update(e);
  const auto is_as_it_was = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() == 1 && tensor.numel() == numel && tensor.scalar_type() == at::kFloat &&
           tensor.device() == parameters.device();
  };
  expect(is_as_it_was(e.parameters), "ElementwiseOptimizer::update: wanted parameters of [", numel, "] fp32 on ",
         parameters.device(), ", got ",
         e.parameters.defined()
             ? c10::str(e.parameters.scalar_type(), " ", e.parameters.sizes(), " on ", e.parameters.device())
             : "nothing",
         ". [T0292] hint: change e.parameters in place, or give it a tensor of its shape");
  for (std::size_t i = 0; i < own_states_; ++i) {
    const bool is_same = i < e.states.size() && e.states[i].is_same(states[i]);
    expect(is_same, "ElementwiseOptimizer::update: state \"", states_[i].name,
           "\" is another tensor now. [T0293] hint: update states in place, such as e.states[", i, "].mul_(0.9)");
    if (numel != own) view_of(state_of(slice, i) + begin).copy_(states[i].narrow(0, 0, own));
  }
  return e.parameters.contiguous();
}

}  // namespace tessera
