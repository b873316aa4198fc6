#pragma once

#include <cstdint>
#include <vector>

#include "sharding/compress/gradient_method.h"

namespace tessera {

/// signSGD with majority vote (Bernstein et al., arXiv 1810.05291, algorithm 1): each rank sends the signs of its
/// contribution, a bit an element, to the rank that counts its votes. That rank sends the majority's signs to all, also
/// a bit an element. Nothing is kept. The sum is the number of ranks with that sign, so the mean gradient is 1 or
/// -1 everywhere.
///
/// A value of 0 votes + and - by turns. A tie is decided so: + in an even step at even places of the flat buffer, and
/// in an odd step at odd places. So an element for which no rank has a gradient only goes back and forth.
class MajorityVote final : public GradientMethod {
 public:
  /// `work`: memory for the messages, of the shape [2 * ranks, words of an owner's message].
  MajorityVote(const Layout& layout, int ranks, float* work);

  void begin_step(std::int64_t step) override { turn_ = static_cast<std::uint64_t>(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup&, KeptGradients&) const override {}

 private:
  const std::vector<Extent> gaps_;
  const int ranks_;
  const std::size_t words_;
  std::uint32_t* const out_;
  std::uint32_t* const in_;
  std::uint64_t turn_ = 0;
};

}  // namespace tessera
