#pragma once

#include <ATen/core/TensorBase.h>

namespace tessera {

/// Makes tensors that alias a parameter share the version counter of the parameter, as `detach()` does. Code that
/// compares versions then sees writes through such tensors. LibTorch itself gives them counters of their own, so that
/// these writes cannot be seen. The tensors are those of `tensor.data()` (Python's `.data`), and those that `set_` or
/// `set_data` (Python's `tensor.data = other`) puts over the memory of a parameter, until one of them gives the tensor
/// other memory. Python's storages write through such a tensor too (`untyped_storage().fill_()`).
///
/// `owner_of` returns the parameter in whose memory `alias` begins, or null if no parameter has the memory. It must not
/// throw. The change holds for the whole process until the process ends, and `owner_of` of the first call stays in use.
///
/// LibTorch asks a table of functions for `data()` and `set_data()` (at::impl::VariableHooksInterface). This call puts
/// another table in front of it, which differs only in these functions. The kernels of `set_` that count versions are
/// replaced when the program starts, by kernels that do the same until this function is called. A tensor that was made
/// in inference mode has no counter, so writes through it are not seen.
void share_version_with_aliases(const c10::TensorImpl* (*owner_of)(const at::TensorBase& alias));

}  // namespace tessera
