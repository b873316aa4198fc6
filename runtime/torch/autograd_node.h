#pragma once

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace tessera {

/// The pointer type of LibTorch's autograd nodes: std::shared_ptr<Node> up to 2.12, c10::intrusive_ptr<Node> since
/// 2.13. Both are copied, moved, compared and tested alike.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

}  // namespace tessera
