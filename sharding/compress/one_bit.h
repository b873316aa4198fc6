#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/compress/first_of_step.h"
#include "sharding/compress/gradient_method.h"

namespace tessera {

/// The compression of 1-bit Adam (Tang et al., arXiv 2102.02888, section 4 and figure 3), for gradients. A message has
/// a bit an element and the mean magnitude of each run of 256 elements, both ways, with error feedback. Each rank adds
/// to its contribution what its earlier ones lacked, and sends each owner the owner's part of it. The owner adds what
/// it gets rank by rank, in fp32, adds what its earlier sums lacked, and sends the sum to all in the same form.
///
/// 1-bit Adam itself compresses momentum, which is less noisy than gradients, and freezes the variance when compression
/// begins (OptimizerConfig::freeze_step). With momentum b this class does so: if M is the last sum, a rank sends b M /
/// ranks + (1 - b) g, and the new sum M' makes the gradients (M' - b M) / (1 - b). An optimizer whose first moment is b
/// m + (1 - b) g then moves it as M moves, and never by the rounding of one gradient alone. Its second moments would
/// square that, which is 1 / (1 - b) times as much. b counts once a step: in further reductions of a step it is
/// 1. M begins at 0, and begins anew when the residuals do: it decides what is rounded, and not what is summed. Where
/// gradients are scaled or dropped behind the sum (clipping), the two momenta part by that.
class OneBit final : public GradientMethod {
 public:
  /// `kept` [numel in whole lines, elements that a rank owns in whole lines; numel more with momentum], `work` [2
  /// ranks, words of an owner's message; elements that a rank owns]. `momentum`: 0 to below 1.
  OneBit(const Layout& layout, int rank, int ranks, float momentum, float* kept, float* work);

  void begin_step(std::int64_t step) override { first_of_step_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override;
  std::int64_t holders(std::int64_t ranks) const override { return ranks + 1; }

 private:
  absl::Status sum_values(Collectives& group, std::string_view label, float* data, std::size_t numel);
  void clear_gaps_of_sums();

  const std::vector<Extent> gaps_;
  const int ranks_;
  const Extent own_;
  const std::size_t words_;
  const std::span<float> kept_;
  float* const kept_of_sum_;
  const float momentum_;
  float* const moving_;  ///< [numel]: M / ranks, the same on every rank; null without momentum
  FirstOfStep first_of_step_;
  std::uint32_t* const out_;
  std::uint32_t* const in_;
};

}  // namespace tessera
