#pragma once

#include <span>

#include "tessera/strategy.h"

namespace tessera {

/// A key of "compression" that makes sums in a way of its own; a strategy has one of them at most.
struct CompressionMethod {
  const char* key;
  bool (*is_used)(const CompressionConfig&);
};
std::span<const CompressionMethod> compression_methods();
/// Their names, for messages: "power_sgd_rank, ... and hook"; "power_sgd_rank, ... or hook".
inline constexpr char kCompressionMethods[] =
    "power_sgd_rank, top_k, random_k, sign, one_bit, qsgd_levels, terngrad and hook";
inline constexpr char kACompressionMethod[] =
    "power_sgd_rank, top_k, random_k, sign, one_bit, qsgd_levels, terngrad or hook";

/// Whether something is kept of gradients from step to step, by one of these or by error feedback.
bool keeps_gradients(const CompressionConfig& compression);

}  // namespace tessera
