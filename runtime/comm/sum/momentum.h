#pragma once

#include <cstddef>

namespace tessera {

/// Loops of methods that send momentum in place of gradients. Each product is rounded before it is added to, with every instruction set.

/// `moving = momentum * moving + values`, and `sum += moving`.
void add_momentum(float momentum, const float* values, std::size_t numel, float* moving, float* sum);

/// `values = decay * moving + rate * values`.
void make_momentum(float decay, float rate, const float* moving, std::size_t numel, float* values);

/// Of `ranks` such values the sum is `values`: it becomes the sum of their gradients, `(values - decay * ranks * moving) / rate`, and moving what
/// it was, over `ranks`.
void unmake_momentum(float decay, float rate, int ranks, std::size_t numel, float* moving, float* values);

}  // namespace tessera
