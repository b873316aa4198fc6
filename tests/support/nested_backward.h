#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::testing {

/// Runs `function(input)` without a graph. Backward runs it again, and then runs another backward inside the first
/// backward. Programs that recompute by themselves do this. So if several such calls use a parameter, its gradient
/// comes in as many parts. REQUIRES: `input` requires gradients.
at::Tensor with_nested_backward(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera::testing
