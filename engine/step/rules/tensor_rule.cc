#include "engine/step/rules/tensor_rule.h"

#include <functional>
#include <numeric>

namespace tessera {
namespace {

std::int64_t numel_of(const TensorState& state) {
  return std::accumulate(state.sizes.begin(), state.sizes.end(), std::int64_t{1}, std::multiplies());
}

}  // namespace

std::shared_ptr<const TensorRule> make_tensor_rule(const OptimizerConfig& optimizer, const OwnRules& own_rules,
                                                   c10::Device device, DeviceKernels* kernels) {
  if (optimizer.type == OptimizerType::kAdafactor)
    return std::make_shared<AdafactorRule>(optimizer.adafactor, device, kernels);
  if (optimizer.type == OptimizerType::kOwnMatrix) return std::make_shared<OwnMatrixRule>(own_rules.matrices, device);
  return nullptr;
}

void add_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, const TensorRule* rule, int parts) {
  if (!rule) return;
  for_each_trainable(units, [&](FlatGroup& group) {
    if (group.matrices.empty()) return;
    std::vector<std::size_t> first = {0};
    std::vector<std::int64_t> numels;
    for (const FlatParameter& parameter : group.parameters) {
      for (TensorState& state : rule->states_of(parameter)) {
        numels.push_back(numel_of(state));
        group.of_tensors.shapes.push_back(std::move(state));
      }
      first.push_back(numels.size());
    }
    if (!numels.empty()) group.tensor_states = {Layout::pack(numels, parts), std::move(first)};
  });
}

}  // namespace tessera
