#include "runtime/comm/sum/top_k.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/sum/momentum.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "sharding/compress/first_of_step.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"
#include "sharding/compress/short_indices.h"
#include "sharding/layout/factor_layout.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

/// Top-k: each rank adds the residual of its last contribution to its contribution, and sends the elements of the
/// result with the largest magnitude. Ranks gather all messages (indices, then values) and add them rank by rank, in
/// fp32. A rank keeps the elements that it did not send as the residual.
///
/// With a momentum m, ranks also keep the momentum u of their own gradients g (Deep Gradient Compression, Lin et al.,
/// arXiv 1712.01887, section 3.2 and equation 4). They add u = m u + g instead of g to the residual. Elements that are
/// sent are set to 0 in u and in the residual (momentum factor masking). The factor m is used once in each step:
/// further reductions of a step add their g to u and to the residual.
class TopK final : public GradientMethod {
 public:
  /// Makes a method that sends `count` elements of a flat buffer of `numel` elements. `kept` has `numel` elements,
  /// rounded up to whole cache lines, and twice as many with momentum. `work` has 2 count (ranks + 1) elements.
  TopK(std::int64_t numel, std::int64_t count, float momentum, float* kept, float* work)
      : count_(static_cast<std::size_t>(count)),
        kept_(kept, static_cast<std::size_t>(numel)),
        momentum_(momentum),
        moving_(momentum > 0 ? kept + MatrixDeal::in_whole_lines(numel) : nullptr),
        own_(work) {}

  void begin_step(std::int64_t step) override { first_of_step_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    add_to_kept(data);
    auto* const indices = reinterpret_cast<std::uint32_t*>(own_);
    float* const values = own_ + count_;
    select_largest(kept_.data(), numel, count_, indices);
    for (std::size_t i = 0; i < count_; ++i) values[i] = std::exchange(kept_[indices[i]], 0.0f);
    for (std::size_t i = 0; moving_ && i < count_; ++i) moving_[indices[i]] = 0;
    float* const all = own_ + 2 * count_;
    TESSERA_RETURN_IF_ERROR(group.all_gather(label, own_, all, 2 * count_ * sizeof(float)).wait());
    std::fill_n(data, numel, 0.0f);
    for (int q = 0; q < group.size(); ++q) {
      const float* const of_rank = all + static_cast<std::size_t>(q) * 2 * count_;
      const auto* const places = reinterpret_cast<const std::uint32_t*>(of_rank);
      for (std::size_t i = 0; i < count_; ++i) data[places[i]] += of_rank[count_ + i];
    }
    return absl::OkStatus();
  }
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    using What = KeptGradients::What;
    const Extent all{0, static_cast<std::int64_t>(kept_.size())};
    kept.residuals.push_back({&group, What::kContributions, all, kept_.data()});
    if (moving_) kept.residuals.push_back({&group, What::kMomentum, all, moving_});
  }

 private:
  void add_to_kept(const float* data) {
    const std::size_t numel = kept_.size();
    if (!moving_) {
      pairwise_sum(std::array<const void*, 2>{kept_.data(), data}, DType::kF32, kept_.data(), numel);
      return;
    }
    if (first_of_step_.take()) {
      add_momentum(momentum_, data, numel, moving_, kept_.data());
      return;
    }
    for (float* const sum : {moving_, kept_.data()})
      pairwise_sum(std::array<const void*, 2>{sum, data}, DType::kF32, sum, numel);
  }

  const std::size_t count_;
  const std::span<float> kept_;
  const float momentum_;
  float* const moving_;  ///< [numel]: the momentum u; null without momentum
  FirstOfStep first_of_step_;
  float* const own_;
};

}  // namespace

MethodLayout layout_of(const TopKConfig& method, const GroupShape& group, int ranks) {
  const std::int64_t kept = in_lines(group.layout.numel());
  return layout_by_gather(method.momentum > 0 ? 2 * kept : kept, 2 * count_of(group, method.fraction), ranks);
}

MadeMethod make_method(const TopKConfig& method, const MethodSite& at) {
  TESSERA_RETURN_IF_ERROR(check_short_indices("top_k", at.numel()));
  return std::make_unique<TopK>(at.numel(), count_of(at.shape, method.fraction), static_cast<float>(method.momentum),
                                at.kept, at.work);
}

}  // namespace tessera
