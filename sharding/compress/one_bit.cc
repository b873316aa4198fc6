#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "runtime/base/message_words.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/momentum.h"
#include "runtime/comm/sum/sign_codec.h"
#include "sharding/compress/first_of_step.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

/// The compression of 1-bit Adam (Tang et al., arXiv 2102.02888, section 4 and figure 3), for gradients. In both
/// directions, a message has one bit for each element and the mean magnitude of each run of 256 elements, with error
/// feedback. Each rank adds to its contribution the part that its earlier messages left out, and sends each owner that
/// owner's part of the result. The owner adds the messages rank by rank, in fp32. It adds the part that its earlier
/// sums left out, and sends the sum to all ranks in the same form.
///
/// 1-bit Adam itself compresses momentum, which is less noisy than gradients, and freezes the variance when compression
/// begins (OptimizerConfig::freeze_step). With momentum b, this class compresses momentum too. If M is the last sum, a
/// rank sends b M / ranks + (1 - b) g. The gradients are computed from the new sum M' as (M' - b M) / (1 - b). If the
/// optimizer's first moment is b m + (1 - b) g, it then changes as M changes, and never by the rounding of a single
/// gradient. (The optimizer's second moments would square a gradient's rounding error, which is 1 / (1 - b) times that
/// of M.) The factor b is used once in each step; further reductions of a step use a factor of one. M begins at 0, and
/// is set to 0 again when the residuals are set to 0. This does no harm, since M has an effect on rounding but not on
/// the sum. If gradients are scaled or dropped after the sum (clipping), M does not change with them, but the
/// optimizer's momentum does.
class OneBit final : public GradientMethod, private SumOfMessages {
 public:
  /// `kept` has `numel` elements, then the elements that a rank owns, and then, with momentum, `numel` elements again.
  /// Each of these parts is rounded up to whole cache lines. `work` has 2 * ranks messages of an owner. `momentum` is
  /// at least 0 and below 1.
  OneBit(const Layout& layout, int rank, int ranks, float momentum, float* kept, float* work)
      : gaps_(layout.gaps().begin(), layout.gaps().end()),
        ranks_(ranks),
        own_(owned_by(rank, layout.numel(), ranks)),
        words_(static_cast<std::size_t>(scaled_sign_words(owned_by_each(layout.numel(), ranks)))),
        kept_(kept, static_cast<std::size_t>(layout.numel())),
        kept_of_sum_(kept + MatrixDeal::in_whole_lines(layout.numel())),
        momentum_(momentum),
        moving_(momentum > 0 ? kept_of_sum_ + MatrixDeal::in_whole_lines(owned_by_each(layout.numel(), ranks))
                             : nullptr),
        out_(reinterpret_cast<std::uint32_t*>(work)),
        in_(out_ + static_cast<std::size_t>(ranks) * words_) {}

  void begin_step(std::int64_t step) override { first_of_step_.begin_step(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    if (!moving_) return sum_values(group, label, data, numel);
    const float decay = first_of_step_.take() ? momentum_ : 1.0f, rate = 1.0f - momentum_;
    make_momentum(decay, rate, moving_, numel, data);
    TESSERA_RETURN_IF_ERROR(sum_values(group, label, data, numel));
    unmake_momentum(decay, rate, ranks_, numel, moving_, data);
    return absl::OkStatus();
  }
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    using What = KeptGradients::What;
    kept.residuals.push_back(
        {&group, What::kContributions, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
    if (own_.numel > 0) kept.residuals.push_back({&group, What::kSums, own_, kept_of_sum_});
    if (moving_)
      kept.residuals.push_back({&group, What::kMomentum, {0, static_cast<std::int64_t>(kept_.size())}, moving_});
  }
  std::int64_t holders(std::int64_t ranks) const override { return ranks + 1; }
  SumOfMessages* of_messages() override { return this; }

 private:
  /// The host makes the messages of momentum. Small contributions have fewer bytes than the messages to their owners;
  /// the host makes these messages, too.
  std::optional<SignMessages> next_messages(std::size_t numel) override {
    const auto parts = static_cast<std::size_t>(ranks_);
    if (moving_ || parts * words_ > numel) return std::nullopt;
    const auto each = static_cast<std::size_t>(owned_by_each(static_cast<std::int64_t>(numel), ranks_));
    return SignMessages{SignMessages::Kind::kScaled, numel, parts, each, words_, 0, kept_.data()};
  }
  absl::Status sum_messages(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    std::memcpy(out_, data, static_cast<std::size_t>(ranks_) * words_ * sizeof(std::uint32_t));
    return exchange(group, label, data, numel);
  }
  absl::Status sum_values(Collectives& group, std::string_view label, float* data, std::size_t numel) {
    // This also clears the words behind messages that have fewer than `words_` words.
    std::fill_n(out_, static_cast<std::size_t>(ranks_) * words_, 0u);
    for (int q = 0; q < ranks_; ++q) {
      const Extent part = owned_by(q, static_cast<std::int64_t>(numel), ranks_);
      encode_signs(kept_.data() + part.offset, data + part.offset, static_cast<std::size_t>(part.numel),
                   out_ + q * words_);
    }
    return exchange(group, label, data, numel);
  }
  /// Sets `data` to the sums that all ranks sent; this rank's messages are in `out_`.
  absl::Status exchange(Collectives& group, std::string_view label, float* data, std::size_t numel) {
    const auto part = [&](int rank) { return owned_by(rank, static_cast<std::int64_t>(numel), ranks_); };
    const std::size_t bytes = words_ * sizeof(std::uint32_t), own_numel = static_cast<std::size_t>(own_.numel);
    TESSERA_RETURN_IF_ERROR(group.all_to_all(label, out_, in_, bytes).wait());
    for (int q = 0; q < ranks_; ++q) add_signs(in_ + q * words_, own_numel, kept_of_sum_);
    std::uint32_t* const own = out_ + static_cast<std::size_t>(group.rank()) * words_;
    std::fill_n(own, words_, 0u);
    clear_gaps_of_sums();  // elements that belong to no tensor must not change a mean
    encode_signs(kept_of_sum_, nullptr, own_numel, own);
    TESSERA_RETURN_IF_ERROR(group.all_gather(label, own, out_, bytes).wait());
    for (int q = 0; q < ranks_; ++q)
      decode_signs(out_ + q * words_, static_cast<std::size_t>(part(q).numel), data + part(q).offset);
    clear_gaps_of_sums();
    for (const Extent gap : gaps_) {
      std::fill_n(data + gap.offset, gap.numel, 0.0f);
      std::fill_n(kept_.data() + gap.offset, gap.numel, 0.0f);
    }
    return absl::OkStatus();
  }
  void clear_gaps_of_sums() {
    for (const Extent gap : gaps_) {
      const Extent here = intersect(gap, own_);
      if (here.numel > 0) std::fill_n(kept_of_sum_ + (here.offset - own_.offset), here.numel, 0.0f);
    }
  }

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

}  // namespace

/// The residual of the sums that this rank makes is kept, too.
MethodLayout layout_of(const OneBitConfig& method, const GroupShape& group, int ranks) {
  const std::int64_t numel = group.layout.numel(), part = owned_by_each(numel, ranks);
  return layout_by_owners((method.momentum > 0 ? 2 : 1) * in_lines(numel) + in_lines(part), scaled_sign_words(part),
                          ranks);
}

MadeMethod make_method(const OneBitConfig& method, const MethodSite& at) {
  return std::make_unique<OneBit>(at.shape.layout, at.rank, at.ranks, static_cast<float>(method.momentum), at.kept,
                                  at.work);
}

}  // namespace tessera
