#include "engine/training/backup_claims.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "sharding/arena.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// The lower half of a rank's counter counts the microbatches that the rank has ended, and the upper half counts the
/// claims.
constexpr std::int64_t kClaim = std::int64_t{1} << 32;

constexpr char kClaimsLabel[] = "claims of microbatches";

class CountersInMemory final : public BackupClaims::Counters {
 public:
  CountersInMemory(Collectives& group, std::int64_t count)
      : memory_(Arena::common(kClaimsLabel, count * static_cast<std::int64_t>(sizeof(Word)), group)) {}

  std::int64_t add(std::int64_t counter, std::int64_t amount) override {
    return word(counter).fetch_add(amount) + amount;
  }
  void reset(std::int64_t counter) override { word(counter).store(0); }

 private:
  using Word = std::atomic<std::int64_t>;
  static_assert(Word::is_always_lock_free);
  Word& word(std::int64_t counter) const { return reinterpret_cast<Word*>(memory_.data())[counter]; }

  const Arena memory_;
};

/// The store keeps every key while the job runs, so each counter has one key for all steps.
class CountersInStore final : public BackupClaims::Counters {
 public:
  CountersInStore(Collectives& group, const BackupClaims::Store& store)
      : own_(store.store.connected_anew()), store_(store) {
    std::int64_t number = 0;  // number of these objects that the job has made so far, this one included
    if (group.rank() == 0) number = value_or_throw(store_.store.add("claims", 1));
    throw_if_error(group.broadcast(kClaimsLabel, &number, sizeof number, 0).wait());
    prefix_ = "claims/" + std::to_string(number) + "/";
  }

  std::int64_t add(std::int64_t counter, std::int64_t amount) override {
    return value_or_throw(
        answer_of([key = key_of(counter), amount](KeyValueStore& store) { return store.add(key, amount); }));
  }
  void reset(std::int64_t counter) override {
    value_or_throw(answer_of([key = key_of(counter)](KeyValueStore& store) -> absl::StatusOr<std::int64_t> {
      if (const absl::Status status = store.set(key, "0"); !status.ok()) return status;
      return std::int64_t{0};
    }));
  }

 private:
  using Answer = absl::StatusOr<std::int64_t>;

  std::string key_of(std::int64_t counter) const { return prefix_ + std::to_string(counter); }

  /// Returns the result of `question`. `question` must own all data that it uses, because it is abandoned if the store
  /// does not answer.
  Answer answer_of(std::function<Answer(KeyValueStore&)> question) {
    if (!own_) return question(store_.store);
    const auto answer = std::make_shared<Answer>(std::int64_t{0});
    const auto ask = [answer, question = std::move(question)](KeyValueStore& store) { *answer = question(store); };
    if (store_.watch.ask_store(own_, ask, store_.limit)) return *answer;
    return make_error(
        ExitCode::kPeerLost,
        "deal.backups: the process that serves the store has not answered (comm.timeout_s sets the limit, and "
        "comm.outage_s where its host has vanished). [T1049] hint: see whether the host of rank 0 is still there");
  }

  /// a separate connection, on which no other code waits; null if the store is in this process, or no such connection
  /// could be made
  const std::shared_ptr<KeyValueStore> own_;
  const BackupClaims::Store store_;
  std::string prefix_;
};

std::unique_ptr<BackupClaims::Counters> make_counters(Collectives& group, const MicrobatchOrder& order,
                                                      const BackupClaims::Store& store) {
  if (group.shares_memory()) return std::make_unique<CountersInMemory>(group, 2 * (order.ranks + order.all()));
  return std::make_unique<CountersInStore>(group, store);
}

}  // namespace

BackupClaims::BackupClaims(std::shared_ptr<Collectives> group, const MicrobatchOrder& order, const Store& store)
    : group_(std::move(group)),
      counters_(make_counters(*group_, order, store)),
      order_(order),
      message_(static_cast<std::size_t>(2 + order.backups)),
      messages_(message_.size() * static_cast<std::size_t>(order.ranks)),
      all_computed_(static_cast<std::size_t>(order.ranks)) {
  begin_step(order);
}

void BackupClaims::begin_step(const MicrobatchOrder& order) {
  if (step_ > 0) counters_->reset(counter_of_rank(group_->rank()));
  for (const std::int64_t microbatch : shared_) counters_->reset(counter_of_ends(microbatch));
  shared_.clear();
  order_ = order;
  ++step_;
  next_ = own_run().begin;
  turn_.reset();
  claims_ = computed_ = claimed_ = 0;
  made_again_.clear();
}

std::int64_t BackupClaims::round() const { return turn_ ? order_.longest_run() + *turn_ : *next_ - own_run().begin; }

RunProgress BackupClaims::add(int rank, std::int64_t amount) const {
  const std::int64_t value = counters_->add(counter_of_rank(rank), amount);
  return {value % kClaim, value / kClaim};
}

bool BackupClaims::is_made(std::int64_t microbatch) const { return counters_->add(counter_of_ends(microbatch), 0) > 0; }

/// Notes that this rank has completed a microbatch that was claimed. Returns false if the other rank ended it first.
bool BackupClaims::make(std::int64_t microbatch) {
  shared_.push_back(microbatch);
  return counters_->add(counter_of_ends(microbatch), 1) == 1;
}

bool BackupClaims::end() {
  ++computed_;
  const std::int64_t ended = *next_;
  bool counts = true;
  if (turn_) {
    counts = make(ended);
    if (counts) made_again_.push_back(ended);
  } else {
    claimed_ = add(group_->rank(), 1).claimed;
    if (ended >= own_run().end - claimed_) counts = make(ended);  // else it is too late for a claim
  }
  choose(/*run_goes_on=*/counts && !turn_);
  return counts;
}

void BackupClaims::pass_over() {
  ++computed_;  // this rank has made the microbatch's forward
  choose(/*run_goes_on=*/false);
}

void BackupClaims::choose(bool run_goes_on) {
  if (run_goes_on) {
    const std::int64_t following = *next_ + 1, end = own_run().end;
    if (following < end && (following < end - claimed_ || !is_made(following))) {
      next_ = following;
      return;
    }
  }
  next_ = claim();
  turn_ = next_ ? std::optional(static_cast<int>(made_again_.size())) : std::nullopt;
}

std::optional<std::int64_t> BackupClaims::claim() {
  while (claims_ < order_.backups) {
    const std::optional<int> slow =
        rank_to_help(order_, group_->rank(), computed_, [this](int rank) { return add(rank, 0); });
    if (!slow) return std::nullopt;
    const TreeBlock run = order_.run_of(*slow);
    const RunProgress now = add(*slow, kClaim);
    const std::int64_t claimed = run.end - now.claimed;
    if (claimed < run.begin + now.ended) continue;  // the microbatch has ended, or others claimed the rest
    ++claims_;
    return claimed;
  }
  return std::nullopt;
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
