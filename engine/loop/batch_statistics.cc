#include "engine/loop/batch_statistics.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "engine/loop/recomputing.h"
#include "engine/loop/reduce_tensor.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Returns the type in which values are summed: fp64 for fp64 values, fp32 for all other types.
at::ScalarType wide_type_of(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns all dimensions except the dimension of the channels.
std::vector<std::int64_t> summed_dimensions(const at::Tensor& input) {
  std::vector<std::int64_t> dimensions = {0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

/// Views [C] as [1, C, 1, ...], so that it broadcasts over `input`.
at::Tensor beside(const at::Tensor& of_channels, const at::Tensor& input) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = -1;
  return of_channels.view(sizes);
}

/// Returns [ranks, n] in fp64 on the CPU, from the `row` [n] of each rank.
at::Tensor rows_of_ranks(const at::Tensor& row, Collectives& group) {
  const at::Tensor rows = gather_over_ranks(group, row.to(at::kCPU, at::kDouble).contiguous());
  throw_if_error(group.status());
  return rows;
}

/// The statistics of the batches of all ranks together.
struct BatchStatistics {
  at::Tensor mean, variance;  ///< [C], fp64; the variance is biased
  double count = 0;           ///< number of values in each channel
};

BatchStatistics statistics_of(const at::Tensor& input, Collectives& group) {
  const std::int64_t channels = input.size(1), count = input.numel() / channels;
  at::Tensor row = at::zeros({2 * channels + 1}, at::kDouble);
  row[2 * channels].fill_(count);
  if (count > 0) {
    const auto [variance, mean] =
        at::var_mean(input.to(wide_type_of(input)), summed_dimensions(input), /*correction=*/0);
    row.narrow(0, 0, channels).copy_(mean);
    row.narrow(0, channels, channels).copy_(variance).mul_(static_cast<double>(count));
  }
  const at::Tensor all = rows_of_ranks(row, group);
  const at::Tensor means = all.narrow(1, 0, channels), squares = all.narrow(1, channels, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  BatchStatistics statistics;
  statistics.count = counts.sum().item<double>();
  expect(statistics.count > 1,
         "SyncBatchNorm wants more than 1 value a channel on all ranks together while training, got ", statistics.count,
         " with inputs such as ", input.sizes(),
         ". [T0188] hint: take larger batches; or eval() for a module that keeps its statistics");
  statistics.mean = (means * counts).sum(0) / statistics.count;
  statistics.variance = (squares + counts * (means - statistics.mean).square()).sum(0) / statistics.count;
  return statistics;
}

void count(const BatchNormState& norm, const BatchStatistics& batch) {
  const auto add = [&](const at::Tensor& kept, const at::Tensor& value) {
    if (kept.defined()) kept.mul_(1 - norm.momentum).add_(value.to(kept.options()), norm.momentum);
  };
  add(norm.mean, batch.mean);
  const bool is_biased = seeded_fault(SeededFault::kBiasedRunningVariance);
  add(norm.variance, is_biased ? batch.variance : batch.variance * (batch.count / (batch.count - 1)));
}

struct BatchNormOverRanks : torch::autograd::Function<BatchNormOverRanks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& scale_by, const std::optional<at::Tensor>& shift_by,
                            const BatchNormState& norm, const std::shared_ptr<Collectives>& group) {
    const at::Tensor weight = scale_by.value_or(at::Tensor()), bias = shift_by.value_or(at::Tensor());
    const BatchStatistics batch = statistics_of(input, *group);
    if (!Recomputing::now()) count(norm, batch);
    const at::ScalarType type = wide_type_of(input);
    const at::Tensor mean = batch.mean.to(input.device(), type);
    const at::Tensor inverse = (batch.variance + norm.eps).rsqrt().to(input.device(), type);
    context->save_for_backward({input, weight, mean, inverse});
    context->saved_data["count"] = batch.count;
    context->saved_data["has_bias"] = bias.defined();
    at::Tensor scale = inverse;
    if (weight.defined()) scale = scale * weight.to(type);
    at::Tensor shift = mean.neg() * scale;
    if (bias.defined()) shift = shift + bias.to(type);
    auto holder = c10::make_intrusive<GroupHolder>();
    holder->group = group;
    context->saved_data["group"] = c10::IValue::make_capsule(holder);
    return (input.to(type) * beside(scale, input) + beside(shift, input)).to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    expect(!at::GradMode::is_enabled(),
           "SyncBatchNorm cannot be differentiated twice. [T0189] hint: leave create_graph out");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &inverse = saved[3];
    const auto capsule = context->saved_data["group"].toCapsule();
    Collectives& group = *static_cast<GroupHolder&>(*capsule).group;
    const double count = context->saved_data["count"].toDouble();
    const at::ScalarType type = wide_type_of(input);
    const std::int64_t channels = input.size(1);

    const at::Tensor dy = gradients[0].to(type);
    const at::Tensor normalised = (input.to(type) - beside(mean, input)) * beside(inverse, input);
    const std::vector<std::int64_t> dimensions = summed_dimensions(input);
    const at::Tensor sum_dy = dy.sum(dimensions), sum_product = (dy * normalised).sum(dimensions);
    const at::Tensor sums = rows_of_ranks(at::cat({sum_dy, sum_product}), group).sum(0) / count;
    const at::Tensor mean_dy = sums.narrow(0, 0, channels).to(dy.options());
    const at::Tensor mean_product = sums.narrow(0, channels, channels).to(dy.options());

    at::Tensor scale = inverse;
    if (weight.defined()) scale = scale * weight.to(type);
    variable_list result(5);
    result[0] = ((dy - beside(mean_dy, input) - normalised * beside(mean_product, input)) * beside(scale, input))
                    .to(input.scalar_type());
    if (weight.defined()) result[1] = sum_product.to(weight.scalar_type());
    if (context->saved_data["has_bias"].toBool()) result[2] = sum_dy.to(weight.defined() ? weight.scalar_type() : type);
    return result;
  }

 private:
  /// Holds a group, so that the autograd graph keeps it alive.
  struct GroupHolder : torch::CustomClassHolder {
    std::shared_ptr<Collectives> group;
  };
};

}  // namespace

at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const BatchNormState& norm, const std::shared_ptr<Collectives>& group) {
  // Autograd functions take no undefined tensors, so undefined tensors become std::nullopt.
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  return BatchNormOverRanks::apply(input, optional(weight), optional(bias), norm, group);
}

}  // namespace tessera
