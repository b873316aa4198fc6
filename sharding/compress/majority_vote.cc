#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "runtime/base/message_words.h"
#include "runtime/base/status.h"
#include "runtime/comm/sum/sign_codec.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"

namespace tessera {
namespace {

/// signSGD with majority vote (Bernstein et al., arXiv 1810.05291, algorithm 1). Each rank sends the signs of its
/// contribution, one bit for each element, to the rank that counts these votes. That rank sends the signs of the
/// majority to all ranks, also one bit for each element. There is no residual. Each element of the sum is the number of
/// ranks, with the sign of the majority. So each element of the mean gradient is 1 or -1.
///
/// A value of 0 votes + and - alternately. A tie is + if the step and the element's index in the flat buffer are both
/// even or both odd; otherwise it is -. So an element for which no rank has a gradient moves up and down alternately,
/// and does not drift.
class MajorityVote final : public GradientMethod, private SumOfMessages {
 public:
  /// `work` is memory for the messages, of the shape [2 * ranks, words of an owner's message].
  MajorityVote(const Layout& layout, int ranks, float* work)
      : gaps_(layout.gaps().begin(), layout.gaps().end()),
        ranks_(ranks),
        words_(static_cast<std::size_t>(vote_words(owned_by_each(layout.numel(), ranks)))),
        out_(reinterpret_cast<std::uint32_t*>(work)),
        in_(out_ + static_cast<std::size_t>(ranks) * words_) {}

  void begin_step(std::int64_t step) override { turn_ = static_cast<std::uint64_t>(step); }
  absl::Status sum(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    // This also clears the words behind messages that have fewer than `words_` words.
    std::fill_n(out_, static_cast<std::size_t>(ranks_) * words_, 0u);
    for (int q = 0; q < ranks_; ++q) {
      const Extent part = owned_by(q, static_cast<std::int64_t>(numel), ranks_);
      cast_votes(data + part.offset, static_cast<std::size_t>(part.numel), turn_, out_ + q * words_);
    }
    return count(group, label, data, numel);
  }
  SumOfMessages* of_messages() override { return this; }
  void add_kept(FlatGroup&, KeptGradients&) const override {}

 private:
  /// Small contributions have fewer bytes than the messages to their owners; the host makes these messages.
  std::optional<SignMessages> next_messages(std::size_t numel) override {
    const auto parts = static_cast<std::size_t>(ranks_);
    if (parts * words_ > numel) return std::nullopt;
    const auto each = static_cast<std::size_t>(owned_by_each(static_cast<std::int64_t>(numel), ranks_));
    return SignMessages{SignMessages::Kind::kVotes, numel, parts, each, words_, turn_};
  }
  absl::Status sum_messages(Collectives& group, std::string_view label, float* data, std::size_t numel) override {
    std::memcpy(out_, data, static_cast<std::size_t>(ranks_) * words_ * sizeof(std::uint32_t));
    return count(group, label, data, numel);
  }
  /// Sets `data` to the signs of the majority; this rank's votes are in `out_`.
  absl::Status count(Collectives& group, std::string_view label, float* data, std::size_t numel) {
    const auto part = [&](int rank) { return owned_by(rank, static_cast<std::int64_t>(numel), ranks_); };
    const std::size_t bytes = words_ * sizeof(std::uint32_t);
    TESSERA_RETURN_IF_ERROR(group.all_to_all(label, out_, in_, bytes).wait());
    const std::size_t most = static_cast<std::size_t>(owned_by_each(static_cast<std::int64_t>(numel), ranks_));
    std::uint32_t* const own = out_ + static_cast<std::size_t>(group.rank()) * words_;
    count_votes(in_, static_cast<std::size_t>(ranks_), most, turn_, own);
    TESSERA_RETURN_IF_ERROR(group.all_gather(label, own, out_, bytes).wait());
    for (int q = 0; q < ranks_; ++q)
      decode_votes(out_ + q * words_, static_cast<std::size_t>(part(q).numel), static_cast<float>(ranks_),
                   data + part(q).offset);
    for (const Extent gap : gaps_) std::fill_n(data + gap.offset, gap.numel, 0.0f);
    return absl::OkStatus();
  }

  const std::vector<Extent> gaps_;
  const int ranks_;
  const std::size_t words_;
  std::uint32_t* const out_;
  std::uint32_t* const in_;
  std::uint64_t turn_ = 0;
};

}  // namespace

MethodLayout layout_of(const SignMajorityConfig&, const GroupShape& group, int ranks) {
  return layout_by_owners(0, vote_words(owned_by_each(group.layout.numel(), ranks)), ranks);
}

MadeMethod make_method(const SignMajorityConfig&, const MethodSite& at) {
  return std::make_unique<MajorityVote>(at.shape.layout, at.ranks, at.work);
}

}  // namespace tessera
