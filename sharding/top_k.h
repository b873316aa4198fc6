#pragma once

#include <span>

#include "sharding/gradient_method.h"

namespace tessera {

/// Top-k: of this rank's contribution, with what its last one lacked, the elements of largest magnitude. Ranks gather each other's (indices,
/// then values) and add them rank by rank, in fp32; what a rank did not send it keeps.
class TopK final : public GradientMethod {
 public:
  /// `count` elements of a flat buffer of `numel`. `kept` [numel], `work` [2 count (ranks + 1)].
  TopK(std::int64_t numel, std::int64_t count, float* kept, float* work);

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    kept.residuals.push_back({&group, false, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
  }
  std::int64_t wire_bytes() const override { return static_cast<std::int64_t>(count_) * 8; }

 private:
  const std::size_t count_;
  const std::span<float> kept_;
  float* const own_;
};

}  // namespace tessera
