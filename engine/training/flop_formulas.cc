#include <ATen/core/Tensor.h>

#include <cstddef>
#include <unordered_map>

#include "engine/training/flop_counter.h"

namespace tessera {
namespace {

using Inputs = c10::ArrayRef<c10::IValue>;
using Sizes = c10::IntArrayRef;

Sizes sizes_of(Inputs inputs, std::size_t i) { return inputs[i].toTensor().sizes(); }

std::int64_t product(Sizes sizes) {
  std::int64_t all = 1;
  for (const std::int64_t size : sizes) all *= size;
  return all;
}

std::int64_t of_product(Sizes a, Sizes b) { return 2 * product(a) * b.back(); }

/// Returns the floating-point operations of a product of matrices [..., m, k] and [..., k, n]: inputs kA and kA + 1.
template <std::size_t kA>
std::int64_t of_matrices(Inputs inputs) {
  return of_product(sizes_of(inputs, kA), sizes_of(inputs, kA + 1));
}

/// Returns the spatial sizes of a tensor [batch, channels, ...] of a convolution.
Sizes places(Sizes sizes) { return sizes.slice(2); }

std::int64_t of_convolution(Sizes where, std::int64_t batch, Sizes weight) {
  return 2 * product(where) * batch * product(weight);
}

/// Returns the number of positions in the result of a convolution that is not transposed.
std::int64_t places_of_result(Sizes input, Sizes weight, const c10::List<std::int64_t>& stride,
                              const c10::List<std::int64_t>& padding, const c10::List<std::int64_t>& dilation) {
  std::int64_t all = 1;
  for (std::size_t i = 2; i < input.size(); ++i) {
    const auto of = [&](const c10::List<std::int64_t>& list) {
      return list.size() == 1 ? list.get(0) : list.get(i - 2);
    };
    all *= (input[i] + 2 * of(padding) - of(dilation) * (weight[i] - 1) - 1) / of(stride) + 1;
  }
  return all;
}

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups). The filter is
/// applied at each position of the result; in a transposed convolution, at each position of the input.
std::int64_t convolution(Inputs inputs) {
  const Sizes input = sizes_of(inputs, 0), weight = sizes_of(inputs, 1);
  if (inputs[6].toBool()) return of_convolution(places(input), input[0], weight);
  const std::int64_t result =
      places_of_result(input, weight, inputs[3].toIntList(), inputs[4].toIntList(), inputs[5].toIntList());
  return of_convolution({&result, 1}, input[0], weight);
}

/// convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask). The gradient of the input is a convolution; it is transposed if the operator is not. The
/// gradient of the weight is a convolution of the input with the gradient of the output.
std::int64_t convolution_backward(Inputs inputs) {
  const Sizes gradient = sizes_of(inputs, 0), input = sizes_of(inputs, 1), weight = sizes_of(inputs, 2);
  const bool transposed = inputs[7].toBool();
  const c10::List<bool> wanted = inputs[10].toBoolList();
  std::int64_t flop = 0;
  if (wanted.get(0)) flop += of_convolution(places(transposed ? input : gradient), gradient[0], weight);
  if (!wanted.get(1)) return flop;
  return flop + (transposed ? of_convolution(places(weight), gradient[1], input)
                            : of_convolution(places(weight), input[1], gradient));
}

/// The sizes of an attention with queries [b, h, s_q, d], keys [b, h', s_k, d] and values [b, h', s_k, d_v].
struct AttentionSizes {
  AttentionSizes(Sizes query, Sizes key, Sizes value)
      : pairs(2 * query[0] * query[1] * query[2] * key[2]), of_query(query[3]), of_value(value[3]) {}
  const std::int64_t pairs, of_query, of_value;
};

std::int64_t attention(Inputs inputs) {
  const AttentionSizes sizes(sizes_of(inputs, 0), sizes_of(inputs, 1), sizes_of(inputs, 2));
  return sizes.pairs * (sizes.of_query + sizes.of_value);
}

/// Counts the operations of the scores, which are computed once more, of the gradients of scores and values, and of the
/// gradients of queries and keys.
std::int64_t attention_backward(Inputs inputs) {
  const AttentionSizes sizes(sizes_of(inputs, 1), sizes_of(inputs, 2), sizes_of(inputs, 3));
  return sizes.pairs * (3 * sizes.of_query + 2 * sizes.of_value);
}

}  // namespace

FlopFormula flop_formula_of(std::string_view operation) {
  static const std::unordered_map<std::string_view, FlopFormula> formulas = {
      {"aten::mm", &of_matrices<0>},
      {"aten::bmm", &of_matrices<0>},
      {"aten::_scaled_mm", &of_matrices<0>},
      {"aten::addmm", &of_matrices<1>},
      {"aten::baddbmm", &of_matrices<1>},
      {"aten::convolution", &convolution},
      {"aten::_convolution", &convolution},
      {"aten::convolution_overrideable", &convolution},
      {"aten::convolution_backward", &convolution_backward},
      {"aten::_scaled_dot_product_efficient_attention", &attention},
      {"aten::_scaled_dot_product_flash_attention", &attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", &attention},
      {"aten::_scaled_dot_product_cudnn_attention", &attention},
      {"aten::_scaled_dot_product_efficient_attention_backward", &attention_backward},
      {"aten::_scaled_dot_product_flash_attention_backward", &attention_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward},
      {"aten::_scaled_dot_product_cudnn_attention_backward", &attention_backward}};
  const auto found = formulas.find(operation);
  return found == formulas.end() ? nullptr : found->second;
}

}  // namespace tessera
