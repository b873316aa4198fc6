#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/top_k.h"
#include "sharding/compress/draw_stream.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"
#include "sharding/compress/short_indices.h"
#include "sharding/layout/factor_layout.h"

namespace tessera {
namespace {

/// Random-k: each rank adds the residual of earlier contributions to its contribution, and sends some elements of the
/// result. These elements are drawn anew for each reduction, and they are the same on all ranks. So no indices are
/// sent, and values are summed by an ordinary all-reduce of fp32. The other elements are kept as the residual.
///
/// The buffer is cut into as many pieces as elements are sent; the lengths of the pieces differ by at most one. One
/// element of each piece is drawn. If the drawn element belongs to no parameter (Layout::gaps), zero is sent. An
/// element is sent once in numel / count reductions on average.
class RandomK final : public GradientMethod {
 public:
  /// Sends `count` elements of a flat buffer of `numel`. `kept` has the shape [numel], and `work` [2 count].
  RandomK(std::int64_t numel, std::int64_t count, DrawStream draws, float* kept, float* work)
      : count_(static_cast<std::size_t>(count)),
        draws_(draws),
        kept_(kept, static_cast<std::size_t>(numel)),
        values_(work) {}

  void begin_step(std::int64_t step) override { draws_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    if (count_ == 0) return absl::OkStatus();
    pairwise_sum(std::array<const void*, 2>{kept_.data(), data}, DType::kF32, kept_.data(), numel);
    auto* const places = reinterpret_cast<std::uint32_t*>(values_ + count_);
    draw(places);
    for (std::size_t i = 0; i < count_; ++i) values_[i] = std::exchange(kept_[places[i]], 0.0f);
    // A value that is not finite might otherwise stay in the residual, and never be noticed in a sum.
    if (!all_finite(kept_.data(), numel)) values_[0] = std::numeric_limits<float>::quiet_NaN();
    TESSERA_RETURN_IF_ERROR(group.all_reduce(label, values_, DType::kF32, values_, count_).wait());
    std::fill_n(data, numel, 0.0f);
    for (std::size_t i = 0; i < count_; ++i) data[places[i]] = values_[i];
    return absl::OkStatus();
  }
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    kept.residuals.push_back(
        {&group, KeptGradients::What::kContributions, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
  }

 private:
  void draw(std::uint32_t* places) {
    const NoiseKey key = draws_.next();
    const std::size_t length = kept_.size() / count_, longer = kept_.size() % count_;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      const std::size_t here = length + (i < longer ? 1 : 0);
      const std::uint64_t noise = noise_at(key, static_cast<std::uint32_t>(i) * kNoiseStride);
      places[i] = static_cast<std::uint32_t>(begin + (noise * here >> 32));
      begin += here;
    }
  }

  const std::size_t count_;
  DrawStream draws_;
  const std::span<float> kept_;
  float* const values_;
};

}  // namespace

/// The indices of the elements lie behind the values in `work`. Indices are not sent.
MethodLayout layout_of(const RandomKConfig& method, const GroupShape& group, int) {
  const std::int64_t count = count_of(group, method.fraction);
  return {{in_lines(group.layout.numel()), in_lines(2 * count)}, {{Exchange::kAllReduce, count}}};
}

MadeMethod make_method(const RandomKConfig& method, const MethodSite& at) {
  TESSERA_RETURN_IF_ERROR(check_short_indices("random_k", at.numel()));
  return std::make_unique<RandomK>(at.numel(), count_of(at.shape, method.fraction), at.common_draws(method.seed),
                                   at.kept, at.work);
}

}  // namespace tessera
