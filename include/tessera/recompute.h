#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `function(inputs)` without keeping what its backward needs; backward runs it a second time and then its
/// backward. Activation memory falls to the inputs; compute rises by one forward (Chen et al., arXiv 1604.06174).
///
/// The second run has the random state, the autocast state and the inputs of the first, so dropout repeats. Parameters that `function` uses get their gradients as usual; sharded ones are gathered again by its
/// operators. Outputs are differentiable if an input is, or if anything in `function` is: at least one input must
/// require gradients, or gradients cannot flow into it (as with PyTorch's reentrant checkpoint).
///
/// An input may be undefined, as an optional mask is; `function` gets it undefined both times.
///
/// Not differentiable twice. `function` must compute the same both times: it may not depend on state that it changes.
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);

/// The same for one tensor in, one out.
at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera
