#include "engine/training/backup_claims.h"

#include <algorithm>
#include <utility>

#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// A word is the number of a step, and in its lowest bits what has become of the microbatch in that step: kMade, or 1 +
/// the rank that has claimed it.
constexpr int kStateBits = 24;
constexpr std::uint64_t kMade = std::uint64_t{1} << (kStateBits - 1);
std::uint64_t word_of(std::uint64_t step, std::uint64_t state) { return step << kStateBits | state; }
std::uint64_t step_of(std::uint64_t word) { return word >> kStateBits; }

/// A microbatch of another rank is worth a claim if that rank would need this many times as long for what it has left
/// as this rank needs for one.
constexpr double kOvertakes = 1.5;

}  // namespace

BackupClaims::BackupClaims(std::shared_ptr<Collectives> group, const MicrobatchOrder& order)
    : group_(std::move(group)),
      memory_(Arena::common("claims of microbatches", order.all() * static_cast<std::int64_t>(sizeof(Word)), *group_)),
      message_(static_cast<std::size_t>(2 + order.backups)),
      messages_(message_.size() * static_cast<std::size_t>(order.ranks)),
      all_computed_(static_cast<std::size_t>(order.ranks)) {
  begin_step(order);
}

void BackupClaims::begin_step(const MicrobatchOrder& order) {
  order_ = order;
  ++step_;
  next_ = order_.run_of(group_->rank()).begin;
  turn_.reset();
  claims_ = computed_ = 0;
  made_again_.clear();
}

std::int64_t BackupClaims::round() const {
  return turn_ ? order_.longest_run() + *turn_ : *next_ - order_.run_of(group_->rank()).begin;
}

bool BackupClaims::is_open(std::int64_t microbatch) const { return step_of(word(microbatch).load()) != step_; }

bool BackupClaims::is_made(std::int64_t microbatch) const { return word(microbatch).load() == word_of(step_, kMade); }

/// Returns false if another rank was the first.
bool BackupClaims::make(std::int64_t microbatch) {
  return word(microbatch).exchange(word_of(step_, kMade)) != word_of(step_, kMade);
}

bool BackupClaims::end() {
  ++computed_;
  const bool counts = make(*next_);
  if (turn_ && counts) made_again_.push_back(*next_);
  choose(/*run_goes_on=*/counts && !turn_);
  return counts;
}

void BackupClaims::pass_over() {
  ++computed_;  // its forward took time
  choose(/*run_goes_on=*/false);
}

void BackupClaims::choose(bool run_goes_on) {
  if (run_goes_on) {
    const std::int64_t following = *next_ + 1;
    if (following < order_.run_of(group_->rank()).end && !is_made(following)) {
      next_ = following;
      return;
    }
  }
  next_ = claim();
  turn_ = next_ ? std::optional(static_cast<int>(made_again_.size())) : std::nullopt;
}

std::optional<std::int64_t> BackupClaims::claim() {
  while (claims_ < order_.backups) {
    const std::optional<std::int64_t> found = of_slowest();
    if (!found) return std::nullopt;
    std::uint64_t seen = word(*found).load();
    const auto state = static_cast<std::uint64_t>(1 + group_->rank());
    if (step_of(seen) == step_ || !word(*found).compare_exchange_strong(seen, word_of(step_, state))) continue;
    ++claims_;
    return found;
  }
  return std::nullopt;
}

/// Returns the last open microbatch of the rank that will end last, if that is late enough. All ranks began the step
/// together, so the microbatches that they have made since say how fast they are.
std::optional<std::int64_t> BackupClaims::of_slowest() const {
  std::optional<std::int64_t> found;
  double longest = kOvertakes / static_cast<double>(computed_);  // in the time since the step began
  for (int rank = 0; rank < order_.ranks; ++rank) {
    if (rank == group_->rank()) continue;
    TreeBlock open = order_.run_of(rank);
    std::int64_t made = 0;
    for (; open.numel() > 0 && is_made(open.begin); ++open.begin) ++made;
    while (open.numel() > 0 && !is_open(open.end - 1)) --open.end;
    if (open.numel() <= 0) continue;
    // It has made half of the one that it is about on average.
    const double left =
        (static_cast<double>(open.numel()) - 0.5) / static_cast<double>(std::max<std::int64_t>(made, 1));
    if (left <= longest) continue;
    longest = left;
    found = open.end - 1;
  }
  return found;
}

const MicrobatchOrder& BackupClaims::agree() {
  const Span span("agree on microbatches", {}, &seconds_);
  std::ranges::fill(message_, 0);
  message_[0] = computed_;
  message_[1] = static_cast<std::int64_t>(made_again_.size());
  std::ranges::copy(made_again_, message_.begin() + 2);
  const std::size_t bytes = message_.size() * sizeof message_[0];
  throw_if_error(group_->all_gather("made again", message_.data(), messages_.data(), bytes).wait());
  order_.made_again.clear();
  for (int rank = 0; rank < order_.ranks; ++rank) {
    const auto own = std::span<const std::int64_t>(messages_).subspan(static_cast<std::size_t>(rank) * message_.size(),
                                                                      message_.size());
    all_computed_[static_cast<std::size_t>(rank)] = own[0];
    for (std::int64_t turn = 0; turn < own[1]; ++turn)
      order_.made_again.push_back({own[static_cast<std::size_t>(2 + turn)], rank, turn});
  }
  std::ranges::sort(order_.made_again, {}, &MadeAgain::microbatch);
  return order_;
}

}  // namespace tessera
