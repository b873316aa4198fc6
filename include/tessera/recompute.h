#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

/// A part of a model: tensors in, tensors out.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `function(inputs)` and returns its outputs without keeping what its backward needs; backward runs the function
/// a second time for that. Activation memory falls to that of the inputs. Compute rises by one forward at most (Chen et
/// al., arXiv 1604.06174). The second run ends where it has computed the last thing that backward needs, so the last
/// product of a transformer's block is not computed twice.
///
/// The second run has the random state, the autocast state and the inputs of the first, so dropout repeats. Parameters
/// that `function` uses get their gradients as usual; its operators gather sharded ones again. No input need require
/// gradients. An input may be undefined, as an optional mask is; `function` gets it undefined both times.
///
/// `function` must compute the same both times: it may not depend on state that it changes. Backward throws c10::Error
/// if the second run saves fewer tensors, or tensors of other shapes, types or devices, or tensors that require
/// gradients where the first run's did not. It also throws if a saved tensor was written in place since, as backward
/// does without checkpoint. Values that the function reads and does not save (a bias) are not checked. Code behind the
/// last operator that needs a backward runs once only. The second run ends by an exception that is no std::exception.
///
/// Backward may run several times (retain_graph); each time runs `function` again.
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);

/// Does what the function above does, for a `function` with one input and one output.
at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera
