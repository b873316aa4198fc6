#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "runtime/base/message_words.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/sign_codec.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"

namespace tessera {
namespace {

/// EF-signSGD (Karimireddy et al., arXiv 1901.09847, algorithm 1). Each rank adds the residual of earlier contributions
/// to its contribution. It sends the signs of the result, and the mean magnitude of each run of 256 elements. It keeps
/// the part that the message left out as the residual. Ranks gather all messages and add them rank by rank, in fp32.
class SignFeedback final : public GradientMethod, private SumOfMessages {
 public:
  /// `kept` has the shape [numel], and `work` [1 + ranks, words of a message].
  SignFeedback(const Layout& layout, float* kept, float* work)
      : gaps_(layout.gaps().begin(), layout.gaps().end()),
        words_(static_cast<std::size_t>(scaled_sign_words(layout.numel()))),
        kept_(kept, static_cast<std::size_t>(layout.numel())),
        own_(reinterpret_cast<std::uint32_t*>(work)) {}

  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    encode_signs(kept_.data(), data, numel, own_);
    return add_up(group, label, data, numel);
  }
  SumOfMessages* of_messages() override { return this; }
  void add_kept(FlatGroup& group, KeptGradients& kept) const override {
    kept.residuals.push_back(
        {&group, KeptGradients::What::kContributions, {0, static_cast<std::int64_t>(kept_.size())}, kept_.data()});
  }

 private:
  std::optional<SignMessages> next_messages(std::size_t numel) override {
    if (words_ > numel) return std::nullopt;  // the host makes a message that is longer than its elements
    return SignMessages{SignMessages::Kind::kScaled, numel, 1, numel, words_, 0, kept_.data()};
  }
  absl::Status sum_messages(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    std::memcpy(own_, data, words_ * sizeof(std::uint32_t));
    return add_up(group, label, data, numel);
  }
  /// Sets `data` to the sum of all ranks' messages; this rank's message is in `own_`.
  absl::Status add_up(Collectives& group, std::string_view label, float* data, std::size_t numel) {
    std::uint32_t* const all = own_ + words_;
    TESSERA_RETURN_IF_ERROR(group.all_gather(label, own_, all, words_ * sizeof(std::uint32_t)).wait());
    decode_signs(all, numel, data);
    for (int q = 1; q < group.size(); ++q) add_signs(all + q * words_, numel, data);
    for (const Extent gap : gaps_) {
      std::fill_n(data + gap.offset, gap.numel, 0.0f);
      std::fill_n(kept_.data() + gap.offset, gap.numel, 0.0f);
    }
    return absl::OkStatus();
  }

  const std::vector<Extent> gaps_;
  const std::size_t words_;
  const std::span<float> kept_;
  std::uint32_t* const own_;
};

}  // namespace

MethodLayout layout_of(const SignFeedbackConfig&, const GroupShape& group, int ranks) {
  return layout_by_gather(in_lines(group.layout.numel()), scaled_sign_words(group.layout.numel()), ranks);
}

MadeMethod make_method(const SignFeedbackConfig&, const MethodSite& at) {
  return std::make_unique<SignFeedback>(at.shape.layout, at.kept, at.work);
}

}  // namespace tessera
