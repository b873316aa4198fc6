#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/gradient_method.h"

namespace tessera {

/// The compression of 1-bit Adam (Tang et al., arXiv 2102.02888, section 4 and figure 3), of gradients: a bit an element and the mean
/// magnitude of each run of 256, both ways, each with error feedback. Of its contribution, with what its earlier ones lacked, each rank sends to
/// each owner that one's part. The owner adds what it gets rank by rank, in fp32, with what its earlier sums lacked, and sends that to all in
/// the same form.
///
/// 1-bit Adam itself compresses momentum, and keeps the variance as it was when compression began. A GradientMethod sees gradients alone, and the
/// optimizer goes on with both of its moments; so this is not 1-bit Adam.
class OneBit final : public GradientMethod {
 public:
  /// `kept` [numel in whole lines, elements that a rank owns], `work` [2 ranks, words of an owner's message; elements that a rank owns].
  OneBit(const Layout& layout, int rank, int ranks, float* kept, float* work);

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override;
  std::int64_t holders(std::int64_t ranks) const override { return ranks + 1; }
  std::int64_t wire_bytes() const override { return static_cast<std::int64_t>(words_) * ranks_ * 4; }

 private:
  void clear_gaps_of_sums();

  const std::vector<Extent> gaps_;
  const int ranks_;
  const Extent own_;
  const std::size_t words_;
  const std::span<float> kept_;
  float* const kept_of_sum_;
  std::uint32_t* const out_;
  std::uint32_t* const in_;
};

}  // namespace tessera
