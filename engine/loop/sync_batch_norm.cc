#include "tessera/sync_batch_norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include <optional>
#include <ostream>

#include "engine/loop/batch_statistics.h"
#include "engine/loop/recomputing.h"
#include "engine/loop/recorded_norms.h"
#include "engine/loop/same_call.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {
namespace {

using NormGroup = std::shared_ptr<Collectives>;

NormGroup norm_group_of(const Mesh& mesh) { return value_or_throw(groups_of(mesh).shared_world("sync_batch_norm")); }

at::Tensor value_or_undefined(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

/// Replaces aten::batch_norm under autograd: calls LibTorch's batch_norm, except for converted modules in training
/// mode. If a module is recorded (RecordedNorm), LibTorch's batch_norm writes the change of the microbatch.
at::Tensor batch_norm_of_ranks(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                               const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps,
                               bool cudnn_enabled) {
  const KnownNorm known = training ? known_norm(running_mean, weight) : KnownNorm();
  if (!known.module || !known.module->is_training()) {
    if (known.recorded) {
      const RecordedNorm::Target target = known.recorded->begin_forward(momentum);
      return at::native::batch_norm(input, weight, bias, target.mean, target.variance, training, target.momentum, eps,
                                    cudnn_enabled);
    }
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                                  cudnn_enabled);
  }
  // The module has just counted this batch for the second time, so the count is lowered by one.
  if (Recomputing::now() && known.batches.defined()) known.batches.sub_(1);
  const BatchNormState norm{value_or_undefined(running_mean), value_or_undefined(running_var), momentum, eps};
  return batch_norm_over_ranks(input, value_or_undefined(weight), value_or_undefined(bias), norm, known.group);
}

// The kernel is registered for each device separately. LibTorch's kernel is a composite, which would take precedence
// over a kernel for DispatchKey::Autograd.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("batch_norm", &batch_norm_of_ranks); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("batch_norm", &batch_norm_of_ranks); }

/// Converts `module` if it is a `Norm`. Returns whether it is a `Norm`. Throws tessera::Error (64) for a norm without
/// tensors.
template <class Norm>
bool convert(const std::string& name, const std::shared_ptr<torch::nn::Module>& module, const NormGroup& group) {
  const auto* const norm = module->as<Norm>();
  if (!norm) return false;
  const at::Tensor& known_by = norm->running_mean.defined() ? norm->running_mean : norm->weight;
  expect(known_by.defined(), "module ", name,
         " is a BatchNorm with neither parameters nor running statistics, so it cannot be converted. [T0203] hint: "
         "write it as tessera::SyncBatchNorm");
  add_converted(known_by, {module, norm->num_batches_tracked, group});
  return true;
}

/// Returns whether `module` is a `Norm` that was converted.
template <class Norm>
bool is_converted(const torch::nn::Module& module) {
  const auto* const norm = module.as<Norm>();
  return norm && known_norm(norm->running_mean, norm->weight).module;
}

}  // namespace

bool is_norm_of_ranks(const torch::nn::Module& module) {
  using namespace torch::nn;
  return module.as<SyncBatchNormImpl>() || is_converted<BatchNorm1dImpl>(module) ||
         is_converted<BatchNorm2dImpl>(module) || is_converted<BatchNorm3dImpl>(module);
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_given, const Mesh& mesh)
    : NormImplBase(options_given), mesh_(mesh) {
  norm_group_of(mesh_);
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  expect(input.dim() >= 2 && input.dim() <= 5 && input.size(1) == options.num_features() && input.is_floating_point(),
         "SyncBatchNorm wants a floating point input of 2 to 5 dimensions [B, ", options.num_features(), ", ...], got ",
         input.scalar_type(), " ", input.sizes(), ". [T0204] hint: its second dimension is that of channels");
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  if (!is_training()) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, !options.track_running_stats(), 0.0,
                          options.eps(), /*cudnn_enabled=*/true);
  }
  BatchNormState norm{running_mean, running_var, options.momentum().value_or(0.0), options.eps()};
  if (num_batches_tracked.defined() && !Recomputing::now()) {
    num_batches_tracked.add_(1);
    if (!options.momentum()) norm.momentum = 1.0 / num_batches_tracked.item<double>();
  }
  return batch_norm_over_ranks(input, weight, bias, norm, norm_group_of(mesh_));
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ")";
}

std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module, const Mesh& mesh) {
  const NormGroup group = norm_group_of(mesh);
  std::vector<std::string> names;
  std::string problem;
  try {
    using namespace torch::nn;
    for (const auto& item : module->named_modules()) {
      const bool is_norm = convert<BatchNorm1dImpl>(item.key(), item.value(), group) ||
                           convert<BatchNorm2dImpl>(item.key(), item.value(), group) ||
                           convert<BatchNorm3dImpl>(item.key(), item.value(), group);
      if (is_norm) names.push_back(item.key());
    }
  } catch (const Error& error) {
    problem = error.message();
  }
  expect_same_call(*group, "convert_sync_batchnorm of " + joined(names), problem);
  return names;
}

}  // namespace tessera
