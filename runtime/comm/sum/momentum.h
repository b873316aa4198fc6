#pragma once

#include <cstddef>

namespace tessera {

/// Loops of methods that send momentum in place of gradients. Each product is rounded before it is added to, with every instruction set.

/// `moving = momentum * moving + values`, and `sum += moving`.
void add_momentum(float momentum, const float* values, std::size_t numel, float* moving, float* sum);

/// `values = decay * moving + rate * values`.
void make_momentum(float decay, float rate, const float* moving, std::size_t numel, float* values);

/// `values` are the sum of what `ranks` made of the same `share`, each of its own gradients: they become the sum of these,
/// `(values - decay * ranks * share) / rate`; and share becomes a rank's share of what they were, `values / ranks`.
void unmake_momentum(float decay, float rate, int ranks, std::size_t numel, float* share, float* values);

}  // namespace tessera
