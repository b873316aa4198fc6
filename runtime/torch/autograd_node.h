#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <utility>

/// True if LibTorch can return the unpack hook of saved tensors before anything is packed (retrieve_unpack_hook).
#define TESSERA_TORCH_TELLS_UNPACK_HOOK \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15))

namespace tessera {

/// The pointer type of LibTorch's autograd nodes: std::shared_ptr<Node> up to 2.12, c10::intrusive_ptr<Node> since
/// 2.13. Both are copied, moved, compared and tested in the same way.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

}  // namespace tessera
