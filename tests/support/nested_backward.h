#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::testing {

/// Runs `function(input)` without a graph. Backward runs it again, and then runs another backward inside the first one,
/// as programs do that recompute by themselves. So parameters that several such calls use get their gradients in
/// as many parts. REQUIRES: `input` requires gradients.
at::Tensor with_nested_backward(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera::testing
