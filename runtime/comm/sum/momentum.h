#pragma once

#include <cstddef>

namespace tessera {

/// Loops of compressors that send momentum instead of gradients. Each product is rounded before it is added, with all
/// instruction sets.

/// Computes `moving = momentum * moving + values`, then `sum += moving`. All arrays have `numel` elements.
void add_momentum(float momentum, const float* values, std::size_t numel, float* moving, float* sum);

/// Computes `values = decay * moving + rate * values`.
void make_momentum(float decay, float rate, const float* moving, std::size_t numel, float* values);

/// Turns a sum of momenta into the sum of their gradients. `values` is the sum of the results of make_momentum on
/// `ranks` ranks, each with its own gradients and the same `share`. `values` becomes the sum of the gradients, `(values
/// - decay * ranks * share) / rate`. `share` becomes a rank's part of the old sum, `values / ranks`.
void unmake_momentum(float decay, float rate, int ranks, std::size_t numel, float* share, float* values);

}  // namespace tessera
