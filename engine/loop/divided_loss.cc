#include "engine/loop/divided_loss.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <cmath>
#include <optional>

#include "sharding/unrecorded.h"

namespace tessera {
namespace {

namespace generated = torch::autograd::generated;

/// Returns the value of a number that autograd saved as a CPU tensor without dimensions; numbers of C++ and Python may
/// become such tensors. Returns nothing if hooks of the program have packed the tensor, because unpacking may run a
/// forward again on this rank only (torch.utils.checkpoint does so).
std::optional<double> number_in(const torch::autograd::SavedVariable& saved) {
  if (saved.has_hooks()) return std::nullopt;
  const at::Tensor value = saved.unpack();
  if (!value.defined() || value.dim() != 0 || !value.is_cpu() || value.requires_grad()) return std::nullopt;
  return value.item<double>();
}

/// Returns the value of a number that an operator got as a Scalar.
std::optional<double> number_in(const at::Scalar& saved) {
  return saved.isComplex() ? std::nullopt : std::optional<double>(saved.to<double>());
}

bool is_near(std::optional<double> number, double wanted) {
  return number && std::abs(*number - wanted) <= 1e-6 * wanted;  // `number` may have been rounded to the loss's dtype
}

}  // namespace

bool is_divided_by(const at::Tensor& loss, std::int64_t number) {
  const Unrecorded unrecorded;
  const torch::autograd::Node* const made_by = loss.grad_fn().get();
  const auto wanted = static_cast<double>(number);
  if (const auto* const division = dynamic_cast<const generated::DivBackward0*>(made_by))
    return is_near(number_in(division->other_), wanted);
  if (const auto* const division = dynamic_cast<const generated::DivBackward1*>(made_by))
    return is_near(number_in(division->other), wanted);
  if (const auto* const product = dynamic_cast<const generated::MulBackward0*>(made_by))
    return is_near(number_in(product->other_), 1 / wanted);
  if (const auto* const product = dynamic_cast<const generated::MulBackward1*>(made_by))
    return is_near(number_in(product->other), 1 / wanted);
  return false;
}

double scaler_factor_of(const at::Tensor& loss) {
  const Unrecorded unrecorded;
  const torch::autograd::Node* const made_by = loss.grad_fn().get();
  std::optional<double> factor;
  if (const auto* const product = dynamic_cast<const generated::MulBackward0*>(made_by))
    factor = number_in(product->other_);
  if (const auto* const product = dynamic_cast<const generated::MulBackward1*>(made_by))
    factor = number_in(product->other);
  constexpr double kLeast = 1 << 10, kMost = 1 << 24;
  int exponent = 0;
  const bool may_be = factor && *factor >= kLeast && *factor <= kMost && std::frexp(*factor, &exponent) == 0.5;
  return may_be ? *factor : 0;
}

}  // namespace tessera
