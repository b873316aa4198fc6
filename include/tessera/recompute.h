#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `function(inputs)` without keeping what its backward needs; backward runs it a second time for that. Activation
/// memory falls to the inputs; compute rises by one forward at the most (Chen et al., arXiv 1604.06174): the second run ends where it
/// has computed the last thing that backward needs, so the last product of a transformer's block is not computed twice.
///
/// The second run has the random state, the autocast state and the inputs of the first, so dropout repeats. Parameters that
/// `function` uses get their gradients as usual; sharded ones are gathered again by its operators. It need not have an
/// input that requires gradients. An input may be undefined, as an optional mask is; `function` gets it undefined both times.
///
/// `function` must compute the same both times: it may not depend on state that it changes. Where it saves tensors of other
/// shapes, types or devices the second time, or fewer, or some that want gradients where they did not, backward throws c10::Error; and where
/// something that it saved was written in place since, as without checkpoint. What it reads and does not save (a bias) is not watched.
/// What it does behind its last operator that needs a backward, it does once. The second run ends by an exception that is
/// no std::exception.
///
/// Backward may run several times (retain_graph); each runs `function` again.
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);

/// The same for one tensor in, one out.
at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera
