#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

/// A part of a model: tensors in, tensors out.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `function(inputs)` and returns its outputs, without keeping the tensors that its backward needs; backward runs
/// the function a second time to compute them. Activation memory is reduced to that of the inputs. Compute grows by at
/// most one forward (Chen et al., arXiv 1604.06174). The second run ends when it has computed the last tensor that
/// backward needs, so the last product of a transformer block is not computed twice.
///
/// The second run has the random state, the autocast state and the inputs of the first, so dropout repeats. Parameters
/// that `function` uses get their gradients as usual; sharded parameters are gathered again for the second run. No
/// input needs to require gradients. An input may be undefined, such as an optional mask; `function` then gets it
/// undefined both times.
///
/// `function` must compute the same both times: it must not depend on state that it changes. Backward throws c10::Error
/// if the second run saves fewer tensors than the first run, or a tensor of another shape, type or device. It also
/// throws if a saved tensor requires gradients in only one of the two runs. Like a backward without checkpoint, it
/// throws if a saved tensor was written in place after it was saved. Values that the function reads and does not save
/// (such as a bias) are not checked. Code behind the last operator that needs a backward runs only once: an exception
/// ends the second run there. This exception is not a std::exception, so a handler of std::exception in `function` does
/// not catch it.
///
/// Backward may run several times (retain_graph); each time runs `function` again.
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs);

/// Works like the function above, for a `function` with one input and one output.
at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input);

}  // namespace tessera
