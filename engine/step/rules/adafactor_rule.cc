#include <ATen/ops/empty.h>

#include "engine/step/rules/tensor_rule.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

AdafactorTensor in_rows(const WholeTensor& tensor) {
  const std::vector<std::int64_t>& sizes = tensor.parameter.sizes;
  AdafactorTensor t;
  t.parameter = tensor.masters;
  t.gradient = tensor.gradient;
  if (sizes.size() < 2) {
    t.columns = tensor.parameter.numel;
    t.variance = tensor.states[0];
    return t;
  }
  t.columns = sizes[sizes.size() - 1];
  t.rows = sizes[sizes.size() - 2];
  t.matrices = tensor.parameter.numel / (t.rows * t.columns);
  t.row_var = tensor.states[0];
  t.col_var = tensor.states[1];
  return t;
}

bool lies_in_rows(const FlatParameter& parameter) {
  std::int64_t next = 1;
  for (std::size_t i = parameter.sizes.size(); i-- > 0; next *= parameter.sizes[i]) {
    if (parameter.sizes[i] != 1 && parameter.strides[i] != next) return false;
  }
  return true;
}

at::Tensor view_as(const FlatParameter& parameter, std::span<float> values, c10::Device device) {
  return memory_view(values.data(), DType::kF32, parameter.sizes, parameter.strides, device);
}

}  // namespace

std::vector<TensorState> AdafactorRule::states_of(const FlatParameter& parameter) const {
  const std::vector<std::int64_t>& sizes = parameter.sizes;
  if (sizes.size() < 2) return {{"variance", sizes}};
  std::vector<std::int64_t> rows = sizes, columns = sizes;
  rows[sizes.size() - 1] = 1;
  columns[sizes.size() - 2] = 1;
  return {{"row_var", rows}, {"col_var", columns}};
}

void AdafactorRule::step(const AdafactorStep& numbers, const AdafactorTensor& tensor) const {
  if (!kernels_) return step_adafactor(config_, numbers, tensor);
  const Unrecorded unrecorded;
  const std::size_t count = adafactor_scratch(tensor);
  const at::Tensor scratch = at::empty({static_cast<std::int64_t>(count)}, at::device(device_).dtype(at::kDouble));
  kernels_->adafactor(config_, numbers, tensor, {scratch.data_ptr<double>(), count});
}

void AdafactorRule::update(const WholeTensor& tensor) const {
  const FlatParameter& parameter = tensor.parameter;
  if (parameter.numel == 0) return;
  const AdafactorStep numbers{tensor.lr, tensor.weight_decay, tensor.step};
  if (lies_in_rows(parameter)) return step(numbers, in_rows(tensor));
  const Unrecorded unrecorded;
  const at::Tensor masters = view_as(parameter, tensor.masters, device_);
  const at::Tensor rows = masters.contiguous(), gradient = view_as(parameter, tensor.gradient, device_).contiguous();
  WholeTensor copy = tensor;
  copy.masters = {rows.data_ptr<float>(), tensor.masters.size()};
  copy.gradient = {gradient.data_ptr<float>(), tensor.gradient.size()};
  step(numbers, in_rows(copy));
  masters.copy_(rows);
}

}  // namespace tessera
