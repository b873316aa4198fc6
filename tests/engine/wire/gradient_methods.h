#pragma once

#include "tests/engine/on_hosts.h"

namespace tessera::testing {

/// Strategies under which a rank has all gradients of a unit in one place.
inline constexpr ShardingStrategy kWhole[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                              ShardingStrategy::kShardGradients};
inline constexpr double kRate = 0.05;
inline constexpr std::size_t kTimes = 4;

/// Sets plain gradient descent, so that values show the parts that the sums lack. Ranks compare at each step the values
/// that all of them hold.
inline void descend(Strategy& strategy) {
  strategy.gradient_clipping = 0;
  strategy.optimizer.type = OptimizerType::kSgd;
  strategy.optimizer.lr = kRate;
  strategy.optimizer.weight_decay = 0;
  strategy.check.replica_hash_every = 1;
}

/// Returns a change that sets plain gradient descent and a method.
inline Adjust with_method(const CompressionMethod& method) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.method = method;
  };
}

inline Adjust power_sgd(std::int64_t rank) { return with_method(PowerSgdConfig{.rank = rank}); }
inline Adjust top_k(double fraction, double momentum = 0) {
  return with_method(TopKConfig{.fraction = fraction, .momentum = momentum});
}
inline Adjust random_k(double fraction) { return with_method(RandomKConfig{.fraction = fraction, .seed = 7}); }
inline Adjust one_bit() { return with_method(OneBitConfig()); }
inline constexpr double kMomentum = 0.25;
/// Sets gradient descent with momentum.
inline void descend_with_momentum(Strategy& strategy) {
  descend(strategy);
  strategy.optimizer.momentum = kMomentum;
}
/// Sets gradient descent with momentum, and lets ranks send one bit of the momentum for each element.
inline void one_bit_of_momentum(Strategy& strategy) {
  descend_with_momentum(strategy);
  strategy.compression.method = OneBitConfig{.momentum = kMomentum};
}

}  // namespace tessera::testing
