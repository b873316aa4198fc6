#pragma once

#include <ATen/core/TensorBase.h>

namespace tessera {

/// Makes `tensor.data()` (Python's `.data`) share the version counter of `tensor` if `is_watched(tensor)`, as
/// `detach()` does. Code that compares versions then sees writes through `data()`. LibTorch itself gives this tensor
/// over the same memory its own counter, so that such writes cannot be seen. The change holds for the whole process and
/// for good, and `is_watched` of the first call stays in use.
///
/// LibTorch asks a table of functions for `data()` (at::impl::VariableHooksInterface). This call puts another table in
/// front of it, which differs only in that function.
void share_version_with_data(bool (*is_watched)(const at::TensorBase& tensor));

}  // namespace tessera
