#pragma once

#include <cstdint>

#include "runtime/comm/sum/level_codec.h"
#include "sharding/compress/draw_stream.h"
#include "sharding/compress/gradient_method.h"

namespace tessera {

/// QSGD and TernGrad: each rank's contribution is rounded stochastically to a few levels (LevelForm), so that its
/// expected value does not change. Ranks gather all contributions and add them rank by rank, in fp32. Nothing is kept.
class LevelMethod final : public GradientMethod {
 public:
  /// `draws`: this rank's random numbers. `work` [1 + ranks, words of a message].
  LevelMethod(std::int64_t numel, LevelForm form, DrawStream draws, float* work);

  void begin_step(std::int64_t step) override { draws_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override;
  void add_kept(FlatGroup&, KeptGradients&) const override {}

 private:
  const LevelForm form_;
  const std::size_t words_;
  DrawStream draws_;
  std::uint32_t* const own_;
};

}  // namespace tessera
