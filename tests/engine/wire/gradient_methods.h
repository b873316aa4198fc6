#pragma once

#include "tests/engine/on_hosts.h"

namespace tessera::testing {

/// Strategies under which a rank has all gradients of a unit in one place.
inline constexpr ShardingStrategy kWhole[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                              ShardingStrategy::kShardGradients};
inline constexpr double kRate = 0.05;
inline constexpr std::size_t kTimes = 4;

/// Sets plain descent, so that what sums lack shows. Ranks compare what they hold alike at each step.
inline void descend(Strategy& strategy) {
  strategy.gradient_clipping = 0;
  strategy.optimizer.type = OptimizerType::kSgd;
  strategy.optimizer.lr = kRate;
  strategy.optimizer.weight_decay = 0;
  strategy.check.replica_hash_every = 1;
}

inline Adjust power_sgd(std::int64_t rank, std::int64_t start_step = 0) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.power_sgd_rank = rank;
    strategy.compression.start_step = start_step;
  };
}

inline Adjust top_k(double share) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.top_k = share;
  };
}

/// Plain descent with the compression that `method` says.
inline Adjust with_method(const CompressionConfig& method) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression = method;
  };
}

inline Adjust top_k_momentum(double share, double momentum) {
  return with_method({.top_k = share, .top_k_momentum = momentum});
}
inline Adjust random_k(double share) { return with_method({.random_k = share, .seed = 7}); }
inline Adjust sign(SignForm form) { return with_method({.sign = form}); }
inline Adjust one_bit() { return with_method({.one_bit = true}); }
inline constexpr double kMomentum = 0.25;
/// Sets descent with momentum, of which one bit is sent.
inline void descend_with_momentum(Strategy& strategy) {
  descend(strategy);
  strategy.optimizer.momentum = kMomentum;
}
inline void one_bit_of_momentum(Strategy& strategy) {
  descend_with_momentum(strategy);
  strategy.compression = {.one_bit = true, .one_bit_momentum = kMomentum};
}
inline Adjust qsgd(std::int64_t levels) { return with_method({.qsgd_levels = levels}); }
inline Adjust terngrad() { return with_method({.terngrad = true}); }

}  // namespace tessera::testing
