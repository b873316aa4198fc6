#pragma once

#include <ATen/core/TensorBase.h>

namespace tessera {

/// Makes `tensor.data()` (Python's `.data`) share the version counter of `tensor` if `is_watched(tensor)`, as
/// `detach()` does, so that code which compares versions sees writes through it. `data()` otherwise gives a tensor over
/// the same memory with a counter of its own, and writes through it leave no trace. The change holds for the whole
/// process and for good; the first call's `is_watched` stays.
///
/// LibTorch asks a table of functions for `data()` (at::impl::VariableHooksInterface); this call puts a table around it
/// that differs in that function only.
void share_version_with_data(bool (*is_watched)(const at::TensorBase& tensor));

}  // namespace tessera
