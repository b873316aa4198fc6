#pragma once

#include <span>

#include "sharding/compress/draw_stream.h"
#include "sharding/compress/gradient_method.h"

namespace tessera {

/// Random-k: each rank adds to its contribution what its earlier ones lacked, and sends some elements of the sum. They
/// are drawn anew for each reduction, the same on all ranks. So no places travel, and values are summed by an ordinary
/// all-reduce of fp32; the other elements are kept.
///
/// The buffer is cut into as many pieces as elements are sent, with lengths that differ by one at most. One element
/// of each piece is drawn. If it lies in a gap, it is sent as zero. An element waits for 1 / share reductions on
/// average.
class RandomK final : public GradientMethod {
 public:
  /// Sends `count` elements of a flat buffer of `numel`. `kept` [numel], `work` [2 count].
  RandomK(std::int64_t numel, std::int64_t count, DrawStream draws, float* kept, float* work);

  void begin_step(std::int64_t step) override { draws_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    kept.residuals.push_back(
        {&group, KeptGradients::What::kContributions, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
  }

 private:
  void draw(std::uint32_t* places);

  const std::size_t count_;
  DrawStream draws_;
  const std::span<float> kept_;
  float* const values_;
};

}  // namespace tessera
