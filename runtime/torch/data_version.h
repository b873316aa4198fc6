#pragma once

#include <ATen/core/TensorBase.h>

namespace tessera {

/// `tensor.data()`, Python's `.data`, gives a tensor over the same memory with a version counter of its own, so that writes through it
/// leave no trace. From this call on it shares the counter of `tensor` where `is_watched(tensor)`, as `detach()` does: whoever compares
/// versions sees the write. For the whole process and for good; the first call's `is_watched` stays.
///
/// LibTorch asks a table of functions for `data()` (at::impl::VariableHooksInterface); this puts one around it that differs in that only.
void share_version_with_data(bool (*is_watched)(const at::TensorBase& tensor));

}  // namespace tessera
