#include <algorithm>
#include <cstdint>

#include "runtime/base/message_words.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/level_codec.h"
#include "sharding/compress/draw_stream.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"

namespace tessera {
namespace {

/// QSGD and TernGrad: each rank's contribution is rounded stochastically to a few levels (LevelForm), so that its
/// expected value does not change. Ranks gather all contributions and add them rank by rank, in fp32. There is no
/// residual.
class LevelMethod final : public GradientMethod {
 public:
  /// `draws` gives this rank's random numbers. `work` has the shape [1 + ranks, words of a message].
  LevelMethod(std::int64_t numel, LevelForm form, DrawStream draws, float* work)
      : form_(form),
        words_(static_cast<std::size_t>(level_words(form.levels, numel))),
        draws_(draws),
        own_(reinterpret_cast<std::uint32_t*>(work)) {}

  void begin_step(std::int64_t step) override { draws_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    encode_levels(form_, data, numel, draws_.next(), own_);
    std::uint32_t* const all = own_ + words_;
    TESSERA_RETURN_IF_ERROR(group.all_gather(label, own_, all, words_ * sizeof(std::uint32_t)).wait());
    std::fill_n(data, numel, 0.0f);
    for (int q = 0; q < group.size(); ++q) add_levels(form_, all + q * words_, numel, data);
    return absl::OkStatus();
  }
  void add_kept(FlatGroup&, KeptGradients&) const override {}

 private:
  const LevelForm form_;
  const std::size_t words_;
  DrawStream draws_;
  std::uint32_t* const own_;
};

MethodLayout layout_of_levels(std::int64_t levels, const GroupShape& group, int ranks) {
  return layout_by_gather(0, level_words(levels, group.layout.numel()), ranks);
}

MadeMethod make_level_method(LevelForm form, std::int64_t seed, const MethodSite& at) {
  return std::make_unique<LevelMethod>(at.numel(), form, at.own_draws(seed), at.work);
}

}  // namespace

MethodLayout layout_of(const QsgdConfig& method, const GroupShape& group, int ranks) {
  return layout_of_levels(method.levels, group, ranks);
}

MadeMethod make_method(const QsgdConfig& method, const MethodSite& at) {
  return make_level_method({method.levels, LevelNorm::kSquares}, method.seed, at);
}

MethodLayout layout_of(const TernGradConfig&, const GroupShape& group, int ranks) {
  return layout_of_levels(1, group, ranks);
}

MadeMethod make_method(const TernGradConfig& method, const MethodSite& at) {
  return make_level_method({1, LevelNorm::kMagnitude}, method.seed, at);
}

}  // namespace tessera
