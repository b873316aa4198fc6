#pragma once

#include <span>

#include "sharding/compress/first_of_step.h"
#include "sharding/compress/gradient_method.h"

namespace tessera {

/// Top-k: each rank adds to its contribution what its last one lacked, and sends the elements of largest magnitude of
/// the sum. Ranks gather all messages (indices, then values) and add them rank by rank, in fp32. A rank keeps what it
/// did not send.
///
/// Ranks also keep the momentum u of their own gradients g where there is a momentum m (Deep Gradient Compression, Lin
/// et al., arXiv 1712.01887, section 3.2 and equation 4). They add u = m u + g instead of g to what is kept; elements
/// that are sent are 0 in both afterwards (momentum factor masking). m counts once a step: further reductions of a step
/// add their g to both.
class TopK final : public GradientMethod {
 public:
  /// Sends `count` elements of a flat buffer of `numel`. `kept` has `numel` elements in whole lines, and twice as many
  /// with momentum. `work` has 2 count (ranks + 1) elements.
  TopK(std::int64_t numel, std::int64_t count, float momentum, float* kept, float* work);

  void begin_step(std::int64_t step) override { first_of_step_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override;

 private:
  void add_to_kept(const float* data);

  const std::size_t count_;
  const std::span<float> kept_;
  const float momentum_;
  float* const moving_;  ///< [numel]: u; null without momentum
  FirstOfStep first_of_step_;
  float* const own_;
};

}  // namespace tessera
