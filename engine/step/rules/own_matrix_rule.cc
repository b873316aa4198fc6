#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

#include "checkpoint/saved_checkpoint.h"
#include "engine/step/rules/naming.h"
#include "engine/step/rules/tensor_rule.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

template <class... Text>
void require_of_rule(bool good, const FlatParameter& parameter, const Text&... text) {
  if (!good) throw Error(ExitCode::kUsage, c10::str("MatrixOptimizer, parameter ", parameter.name, ": ", text...));
}

}  // namespace

std::vector<TensorState> OwnMatrixRule::states_of(const FlatParameter& parameter) const {
  std::vector<TensorState> states;
  std::set<std::string> names;
  std::vector<MatrixOptimizer::State> of_rule =
      naming("parameter", parameter.name, [&] { return rule_->states(parameter.sizes.at(0), parameter.sizes.at(1)); });
  for (MatrixOptimizer::State& state : of_rule) {
    require_of_rule(is_name_of_state(state.name) && names.insert(state.name).second, parameter, "\"", state.name,
                    "\" is no name for a state. [T0283] hint: give each a name of its own, without '|' and '.', and "
                    "none that checkpoints use: ema, master, value, buffer, item, generator, gpu_generator, factors, "
                    "outer_momentum");
    require_of_rule(std::ranges::all_of(state.sizes, [](std::int64_t size) { return size >= 0; }), parameter,
                    "the state \"", state.name, "\" wants sizes of 0 and more, got ", at::IntArrayRef(state.sizes),
                    ". [T0284] hint: return sizes of 0 and more from MatrixOptimizer::states");
    states.push_back({std::move(state.name), std::move(state.sizes)});
  }
  require_of_rule(states.size() <= MatrixOptimizer::kMostStates, parameter, "at most ", MatrixOptimizer::kMostStates,
                  " states, got ", states.size(),
                  ". [T0285] hint: return fewer from MatrixOptimizer::states, such as two joined into one tensor");
  return states;
}

void OwnMatrixRule::update(const WholeTensor& tensor) const {
  const Unrecorded unrecorded;
  const FlatParameter& parameter = tensor.parameter;
  const auto as_parameter = [&](std::span<float> values) {
    return memory_view(values.data(), DType::kF32, parameter.sizes, parameter.strides, device_);
  };
  const std::span<const TensorState> states = tensor.state_shapes;
  const at::Tensor masters = as_parameter(tensor.masters);
  MatrixOptimizer::Matrix m;
  m.parameter = masters;
  m.gradient = as_parameter(tensor.gradient);
  for (std::size_t i = 0; i < states.size(); ++i) {
    m.states.push_back(memory_view(tensor.states[i].data(), DType::kF32, states[i].sizes, std::nullopt, device_));
  }
  m.lr = tensor.lr;
  m.weight_decay = tensor.weight_decay;
  m.step = tensor.step;
  const std::vector<at::Tensor> as_given = m.states;
  naming("parameter", parameter.name, [&] { rule_->update(m); });
  const bool is_as_it_was = m.parameter.defined() && m.parameter.sizes() == masters.sizes() &&
                            m.parameter.scalar_type() == at::kFloat && m.parameter.device() == masters.device();
  require_of_rule(is_as_it_was, parameter, "after update, wanted ", masters.sizes(), " fp32 on ", masters.device(),
                  ", got ",
                  m.parameter.defined()
                      ? c10::str(m.parameter.scalar_type(), " ", m.parameter.sizes(), " on ", m.parameter.device())
                      : "nothing",
                  ". [T0286] hint: change m.parameter in place, or give it a tensor of its shape");
  for (std::size_t i = 0; i < states.size(); ++i) {
    const bool is_same = i < m.states.size() && m.states[i].is_same(as_given[i]);
    require_of_rule(is_same, parameter, "after update, the state \"", states[i].name,
                    "\" is another tensor. [T0287] hint: update states in place, such as m.states[", i, "].mul_(0.9)");
  }
  if (!m.parameter.is_same(masters)) masters.copy_(m.parameter);
}

}  // namespace tessera
