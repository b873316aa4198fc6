#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/compress/gradient_method.h"

namespace tessera {

/// EF-signSGD (Karimireddy et al., arXiv 1901.09847, algorithm 1). Each rank adds to its contribution what its earlier
/// ones lacked, and sends the signs of the sum times the mean magnitude of each run of 256 elements. It keeps what the
/// message lacks. Ranks gather all messages and add them rank by rank, in fp32.
class SignFeedback final : public GradientMethod {
 public:
  /// `kept` [numel], `work` [1 + ranks, words of a message].
  SignFeedback(const Layout& layout, float* kept, float* work);

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    kept.residuals.push_back(
        {&group, KeptGradients::What::kContributions, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
  }

 private:
  const std::vector<Extent> gaps_;
  const std::size_t words_;
  const std::span<float> kept_;
  std::uint32_t* const own_;
};

}  // namespace tessera
