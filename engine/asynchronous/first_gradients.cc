#include "engine/asynchronous/first_gradients.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "engine/step/agree/gradient_norm.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {

// This file decides which ranks take part in a step, and lets them sum and update.
//
// Ranks join a step by an atomic exchange of Control::turn (`try_to_join`). All other data of a rank about a step are
// in its Entry. Other ranks read these data after they have found the step's number in `joined`, `summed` or `updated`.
// The ranks of a step divide the owners' shards among themselves (`for_own_owners`). The first rank that sees the end
// of the step opens the next one (`open_next`). A rank that comes too late waits for the end of the step in `miss`.

namespace {

/// A turn is one number: the number of steps that are over and, in the lowest 16 bits, the number of ranks that have
/// joined the next step.
constexpr int kRankBits = 16;
std::int64_t completed_of(std::uint64_t turn) { return static_cast<std::int64_t>(turn >> kRankBits); }
std::int64_t joined_of(std::uint64_t turn) { return static_cast<std::int64_t>(turn & ((1U << kRankBits) - 1)); }
std::uint64_t turn_of(std::int64_t completed, std::int64_t joined) {
  return static_cast<std::uint64_t>(completed) << kRankBits | static_cast<std::uint64_t>(joined);
}

}  // namespace

struct alignas(128) FirstGradients::Control {
  std::atomic<std::uint64_t> turn;
  std::atomic<std::int64_t> dropped, applied, samples;
};

/// `joined` is the latest step that the rank has joined. `summed` and `updated` are the latest steps in which it has
/// summed and updated its shards. A rank writes the other fields before one of these numbers. Other ranks of the step
/// read this number before the other fields.
struct alignas(128) FirstGradients::Entry {
  std::atomic<std::int64_t> joined, summed, updated;
  double loss, weight;
  std::int64_t tokens, samples;
  std::uint64_t numbers;  ///< digest_of_numbers
  std::int64_t finite;    ///< whether the sums of the rank's shards are finite
};

FirstGradients::FirstGradients(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                               PeerBoard& board, HostCopies& copies)
    : CommonParameters(board),
      shards_(units, plan, board, copies),
      copies_(copies),
      backups_(plan.update().outer.backups),
      needed_(board.size() - backups_),
      gradient_bytes_(copies.gradient_bytes()),
      totals_(norm_totals(units, static_cast<std::size_t>(board.size()))) {
  const auto ranks = static_cast<std::size_t>(board.size());
  parts_.resize(ranks);
  const PlannedPlacement& placement = plan.placement();
  for_each_trainable(units, [&](FlatGroup& group) {
    parameters_ += group.parameters.size();
    for (int owner = 0; owner < board.size(); ++owner) {
      const Extent extent = owned(placement.optimizer, placement.mesh.of(owner), group.layout.numel());
      parts_[static_cast<std::size_t>(owner)].push_back({&group, extent, NormSums(norm_runs(group, extent))});
    }
  });
  const std::size_t flags = (ranks * parameters_ + 7) / 8 * 8;
  const std::size_t heads = sizeof(Control) + ranks * sizeof(Entry);
  memory_ = Arena::common("what ranks with backups tell each other",
                          static_cast<std::int64_t>(heads + flags + ranks * totals_.most_sums() * sizeof(double)),
                          board.group());
  sums_ = reinterpret_cast<double*>(memory_.data() + heads + flags);
  for (int owner = 0; owner < board.size(); ++owner) read_sums_.push_back(sums_of(owner));
  members_.reserve(ranks);
  sources_.reserve(ranks);
  agreed_.used.resize(parameters_);
  agreed_.squares.resize(totals_.tensors());
  board_.meet("ranks with backups");
}

FirstGradients::Entry& FirstGradients::entry(int rank) const {
  return reinterpret_cast<Entry*>(memory_.data() + sizeof(Control))[rank];
}

std::span<char> FirstGradients::used_of(int rank) const {
  const auto ranks = static_cast<std::size_t>(board_.size());
  auto* const flags = reinterpret_cast<char*>(memory_.data() + sizeof(Control) + ranks * sizeof(Entry));
  return {flags + static_cast<std::size_t>(rank) * parameters_, parameters_};
}

std::int64_t FirstGradients::completed() const { return completed_of(control().turn.load()); }

std::int64_t FirstGradients::dropped() const { return control().dropped.load(); }

void FirstGradients::read_done() { done_ = {control().applied.load(), control().samples.load()}; }

void FirstGradients::set_done(const Counts& counts) {
  done_ = counts;
  control().applied.store(counts.steps);
  control().samples.store(counts.samples);
}

bool FirstGradients::has_joined(int rank) const { return entry(rank).joined.load() >= step_under_way(); }

bool FirstGradients::is_member(int rank) const { return std::ranges::find(members_, rank) != members_.end(); }

bool FirstGradients::is_full() const {
  std::int64_t joined = 0;
  for (int q = 0; q < board_.size(); ++q) joined += has_joined(q) ? 1 : 0;
  return joined == needed_;
}

template <class Arrived>
void FirstGradients::wait_for(const Arrived& arrived, std::int64_t spare) {
  const Span span("wait", {}, &wait_seconds_);
  board_.wait([&] { return "step " + std::to_string(told_step_); }, arrived, spare);
}

/// If a rank is killed between the exchange and the store, the other ranks notice that its process is gone.
bool FirstGradients::try_to_join() {
  std::uint64_t seen = control().turn.load();
  while (completed_of(seen) == known_ && joined_of(seen) < needed_) {
    if (!control().turn.compare_exchange_weak(seen, seen + 1)) continue;
    entry(board_.rank()).joined.store(step_under_way());
    return true;
  }
  return false;
}

bool FirstGradients::offer(std::int64_t step, const LocalStep& own, std::span<const char> used) {
  told_step_ = step;
  board_.look();
  Entry& mine = entry(board_.rank());
  mine.loss = own.loss;
  mine.weight = own.weight;
  mine.tokens = own.tokens;
  mine.samples = own.samples;
  mine.numbers = digest_of_numbers(own.rates, own.options);
  std::ranges::copy(used, used_of(board_.rank()).begin());
  if (!try_to_join()) return false;
  wait_for([&](int q) { return has_joined(q) || is_full(); }, backups_);
  members_.clear();
  for (int q = 0; q < board_.size(); ++q) {
    if (has_joined(q)) members_.push_back(q);
  }
  read_done();  // no rank ends this step before this rank has summed
  return true;
}

template <class Body>
void FirstGradients::for_own_owners(const Body& body) const {
  const auto place = std::ranges::find(members_, board_.rank()) - members_.begin();
  for (auto owner = static_cast<int>(place); owner < board_.size(); owner += static_cast<int>(members_.size()))
    body(owner);
}

/// The sums overwrite this rank's gradients. No other rank reads those elements in this step.
bool FirstGradients::sum_parts(int owner) {
  bool finite = true;
  double* to = sums_of(owner);
  for (Part& part : parts_[static_cast<std::size_t>(owner)]) {
    float* const own = copies_.gradient(*part.group) + (part.extent.offset - part.group->gradient_part.offset);
    sources_.clear();
    for (const int q : members_)
      sources_.push_back(reinterpret_cast<const std::byte*>(own) + (q - board_.rank()) * gradient_bytes_);
    const auto numel = static_cast<std::size_t>(part.extent.numel);
    pairwise_sum(sources_, DType::kF32, own, numel);
    part.sums.reset();
    part.sums.add({own, numel});
    finite = finite && part.sums.finite();
    to = std::ranges::copy(part.sums.sums(), to).out;
  }
  return finite;
}

const AgreedStep& FirstGradients::sum(const LocalStep& own) {
  const std::int64_t step = step_under_way();
  Entry& mine = entry(board_.rank());
  {
    const Span span("sum");
    bool finite = true;
    for_own_owners([&](int owner) { finite = sum_parts(owner) && finite; });
    mine.finite = finite ? 1 : 0;
  }
  mine.summed.store(step);
  wait_for([&](int q) { return !is_member(q) || entry(q).summed.load() >= step; });
  agreed_.loss = agreed_.weight = 0.0;
  agreed_.tokens = agreed_.samples = 0;
  agreed_.finite = true;
  std::ranges::fill(agreed_.used, char{0});
  for (const int q : members_) read(q);
  check_numbers(own);
  agreed_.sum_of_squares = totals_.add_up(read_sums_, agreed_.squares);
  return agreed_;
}

void FirstGradients::read(int rank) {
  const Entry& from = entry(rank);
  add_rank(agreed_, from, static_cast<int>(needed_));
  agreed_.finite = agreed_.finite && from.finite != 0;
  const std::span<const char> used = used_of(rank);
  for (std::size_t i = 0; i < used.size(); ++i) agreed_.used[i] |= used[i];
}

/// All ranks of the step throw. A rank that came too late would wait for these ranks, so each of these ranks first says
/// that it has failed.
void FirstGradients::check_numbers(const LocalStep& own) {
  const std::uint64_t digest = digest_of_numbers(own.rates, own.options);
  for (const int q : members_) {
    if (entry(q).numbers == digest) continue;
    board_.note_failed();
    throw Error(ExitCode::kUsage, "step " + std::to_string(told_step_) + ": rank " + std::to_string(board_.rank()) +
                                      " and rank " + std::to_string(q) +
                                      " have different learning rates or options. [T0896] hint: with \"sync\" backups "
                                      "change them by the number of the "
                                      "step (its result has it), since a rank that is late skips steps");
  }
}

void FirstGradients::update(const ShardRule& rule, const PushRates& with) {
  const Span span("update");
  for_own_owners([&](int owner) { shards_.apply(owner, rule, with); });
}

void FirstGradients::end(const Counts& counts) {
  const std::int64_t step = step_under_way();
  set_done(counts);
  entry(board_.rank()).updated.store(step);
  wait_for([&](int q) { return !is_member(q) || entry(q).updated.load() >= step; });
  open_next();
  known_ = step;
  shards_.end_step();
}

/// Each rank that has seen the step's end tries to open the next step, and the first rank succeeds.
void FirstGradients::open_next() {
  std::uint64_t now = turn_of(known_, needed_);
  control().turn.compare_exchange_strong(now, turn_of(known_ + 1, 0));
}

std::int64_t FirstGradients::miss() {
  const std::int64_t step = step_under_way();
  control().dropped.fetch_add(1);
  // The ranks that take part are known only when enough ranks have joined the step.
  wait_for(
      [&](int q) { return completed() >= step || (is_full() && (!has_joined(q) || entry(q).updated.load() >= step)); });
  open_next();
  const std::int64_t missed = completed() - known_;
  known_ += missed;
  read_done();
  shards_.end_step();
  return missed;
}

void FirstGradients::adopt() {
  board_.meet("values of ranks with backups");
  known_ = completed();
  skipped_ = 0;
  shards_.adopt();
}

/// No step is under way between this function's first barrier and the last barrier of `shards_.bring_together`.
void FirstGradients::bring_together() {
  board_.meet("ranks with backups come together");
  const std::int64_t now = completed();
  skipped_ += now - known_;
  known_ = now;
  read_done();
  shards_.bring_together();
}

}  // namespace tessera
