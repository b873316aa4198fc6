#include "runtime/comm/call_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/observed_collectives.h"

// Finds deadlocks between ranks. GroupCalls records, without a lock, which call of one group the program is in.
// CallWatch's thread looks at all groups twice a second (`look`). After a call has taken 3 s, it exchanges reports with
// other ranks through the store (Exchange). It looks for a proof in these reports (disagreement_of). It publishes the
// proof as the verdict after it has found it twice in a row. A rank that hears the verdict waits until the other ranks
// can have heard it too, and ends its program's call (`end_with`).

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenLooks = 500ms;
constexpr auto kOften = 10s;  // ranks exchange reports at each `look` for this long, then less often
// time for other ranks to hear the verdict; it is longer than the time between two exchanges
constexpr auto kForOthersToHear = 2s;
constexpr auto kForTheProgram = 4s;                  // time in which the program must leave a call that has failed
constexpr auto kForOutside = 500ms;                  // time to leave another library's call, which has not failed
constexpr char kWithOutside = '+', kOwnAlone = '-';  // the first character of a verdict in the store
// age at which news of other libraries' calls is stale; less than kLong
constexpr auto kFresh = 2s;
constexpr int kManyRanks = 16, kNeighbours = 4;
constexpr int kMostOfRankZero = 64;  // most ranks of a job in which all ranks watch rank 0: every port's queue holds
                                     // this many connections
constexpr int kMostTries = 600;      // most times that a rank looks for the next one's port
// A process that ends well may end while other processes are in their last call with it. The other ranks have this time
// to return from that call.
constexpr auto kForLastCalls = CallWatch::kLong;
constexpr auto kToReturn = 1s;  // time for this rank to return from its call after it learns that a rank is gone
// An outage lasts at least this long when the kernel has found a connection silent (NextRank).
constexpr double kSilentByThen = 6;
constexpr std::size_t kGoneGroups = 32;

constexpr const char* kVerdict = "waits/verdict";
constexpr const char* kHint =
    "; every rank must make the same calls in the same order. [T0448] hint: where one rank alone evaluates, saves, "
    "samples, takes a norm, skips a backward, returns early or runs one batch more, let every rank do it, and use what "
    "one rank needs on that rank only. On one machine, `tessera launch --strict` shows such a program";

std::string key_of(int rank) { return "waits/" + std::to_string(rank); }

[[noreturn]] void exit_with(const absl::Status& reason) {
  log_error(message_of(reason) + ". This call cannot be ended, so the process ends");
  std::_Exit(static_cast<int>(exit_code_of(reason)));
}

/// Returns the number of the calling thread, from 1.
int number_of_thread() {
  thread_local const int number = CallWatch::number_of(pthread_self());
  return number;
}

}  // namespace

// --- GroupCalls ---

GroupCalls::GroupCalls(std::string name, std::string family, const GroupRanks& ranks,
                       std::shared_ptr<const CallVerdict> verdict)
    : name_(std::move(name)), family_(std::move(family)), ranks_(ranks), verdict_(std::move(verdict)) {
  calls_[0].store(make_signature(Operation::kNone, "", DType::kU8, 0));
  enter(0);
}

std::uint64_t GroupCalls::begins(CallSignature call) {
  const std::uint64_t number = begun_.load(std::memory_order_relaxed) + 1;
  call.sequence = number;
  calls_[number % kKept].store(call);
  if (number == 1) note_thread(number_of_thread(), /*forget_others=*/true);
  begun_.store(number, std::memory_order_release);
  enter(number);
  return number;
}

void GroupCalls::enter(std::uint64_t call) {
  if (const int thread = number_of_thread(); thread_.load(std::memory_order_relaxed) != thread)
    note_thread(thread, /*forget_others=*/false);
  const std::uint64_t entered = entered_.load(std::memory_order_relaxed) + 1;
  entered_.store(entered, std::memory_order_relaxed);
  place_.store(entered << 8 | call % kKept << 1 | 1, std::memory_order_release);
}

// Remembers a thread that makes calls. The thread that made the group counts as one until some thread makes a call.
void GroupCalls::note_thread(int thread, bool forget_others) {
  thread_.store(thread, std::memory_order_relaxed);
  std::size_t place = kThreads - 1;  // if there are more threads than places, the latest takes the last place
  for (std::size_t i = 0; i < kThreads; ++i) {
    if (forget_others) threads_[i].store(0, std::memory_order_relaxed);
    const int known = threads_[i].load(std::memory_order_relaxed);
    if (known == thread) return;
    if (known == 0) place = std::min(place, i);
  }
  threads_[place].store(thread, std::memory_order_relaxed);
}

void GroupCalls::is_made_of(Collectives* group) {
  const MutexLock lock(mutex_);
  group_ = group;
}

bool GroupCalls::lives() const {
  const MutexLock lock(mutex_);
  return group_ != nullptr;
}

bool GroupCalls::end_if_left_alone(Collectives::HasKey has_key) {
  const MutexLock lock(mutex_);  // the lock keeps the group alive while its call is ended
  return group_ && group_->end_if_left_alone(has_key);
}

std::uint64_t GroupCalls::place() const {
  if (const std::uint64_t place = place_.load(std::memory_order_acquire); place != 0) return place;
  const MutexLock lock(mutex_);
  return group_ ? group_->stands_in() << 1 : 0;
}

std::string GroupCalls::text_of(const CallSignature& call) const {
  return call.sequence == 0 ? "the set-up of a group, as an Engine makes some (" + name_ + ")" : call.describe();
}

WaitReport::Wait GroupCalls::describe(std::uint64_t place) const {
  const std::uint64_t slot = (place >> 1) % kKept;
  const CallSignature call = calls_[slot].load();
  return {name_, call.sequence, thread_.load(std::memory_order_relaxed), text_of(call)};
}

WaitReport::Group GroupCalls::report() const {
  WaitReport::Group report;
  report.first = ranks_.first, report.count = ranks_.count, report.stride = ranks_.stride;
  report.family = family_;
  report.begun = begun_.load(std::memory_order_acquire);
  for (const auto& thread : threads_)
    if (const int number = thread.load(std::memory_order_relaxed)) report.threads.push_back(number);
  for (std::uint64_t number = report.begun; number > 0 && number + kReported > report.begun; --number) {
    const CallSignature call = calls_[number % kKept].load();
    if (call.sequence == number) report.latest[number] = text_of(call);
  }
  return report;
}

// --- CallWatch ---

/// Returns whether one of these ranks waits in a call of another library.
static bool has_outside_wait(const std::vector<WaitReport>& reports) {
  return std::any_of(reports.begin(), reports.end(), [](const WaitReport& report) {
    return std::any_of(report.waits.begin(), report.waits.end(), [&](const WaitReport::Wait& wait) {
      const auto group = report.groups.find(wait.group);
      return group != report.groups.end() && group->second.is_outside;
    });
  });
}

/// The requests to the store in one `look`, and the answers.
struct CallWatch::Exchange {
  std::string key, own;
  bool writes = false;
  std::string finding;
  std::vector<int> others;
  std::string verdict;
  std::vector<std::string> texts;

  void run(KeyValueStore& store) {
    if (writes) store.set(key, own).IgnoreError();
    if (!finding.empty() && store.add("waits/verdicts", 1).value_or(0) == 1) store.set(kVerdict, finding).IgnoreError();
    if (const auto text = store.get(kVerdict, 0ms); text.ok()) verdict = *text;
    if (!verdict.empty()) return;
    for (const int rank : others)
      if (auto text = store.get(key_of(rank), 0ms); text.ok()) texts.push_back(*std::move(text));
  }
};

CallWatch::CallWatch(int rank, int world_size, std::shared_ptr<KeyValueStore> store, Report report)
    : rank_(rank), world_size_(world_size), store_(std::move(store)), report_(std::move(report)), process_(getpid()) {
  const std::string address = store_->own_address();
  if (world_size == 1 || address.empty()) return;
  next_.rank = std::make_unique<NextRank>(rank, world_size, address);
  if (rank != 0 && next_.rank->rank() != 0 && world_size <= kMostOfRankZero)
    first_.rank = std::make_unique<NextRank>(/*watched=*/0);
}

CallWatch::~CallWatch() {
  if (!thread_.joinable()) return;
  if (getpid() != process_) {  // a forked process, which does not have the watch's thread
    thread_.detach();
    return;
  }
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CallWatch::bear_outages(double seconds) {
  const auto longer = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * (seconds - kSilentByThen)));
  silence_ = std::max<std::chrono::milliseconds>(longer, kForLastCalls);
}

int CallWatch::number_of(pthread_t thread) {
  static Mutex mutex;
  static std::map<pthread_t, int> numbers ABSL_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  return numbers.try_emplace(thread, static_cast<int>(numbers.size()) + 1).first->second;
}

void CallWatch::tell(OutsideCalls calls) {
  const MutexLock lock(mutex_);
  outside_ = std::move(calls);
  told_ = Clock::now();
}

bool CallWatch::hears_of_outside() const { return Clock::now() - told_ < kFresh; }

absl::StatusOr<std::shared_ptr<Collectives>> CallWatch::watched(
    const std::string& name, const std::string& family, const GroupRanks& ranks,
    absl::FunctionRef<absl::StatusOr<std::shared_ptr<Collectives>>()> make) {
  if (ranks.count == 1) return make();
  const auto calls = std::make_shared<GroupCalls>(name + "@" + std::to_string(ranks.first), family, ranks, verdict_);
  {
    const MutexLock lock(mutex_);
    forget_old_groups();
    watched_.push_back({calls});
    if (!thread_.joinable()) {
      thread_ = std::thread([this, rank = log_rank()] {
        set_log_rank(rank);
        run();
      });
    }
  }
  auto group = make();
  if (group.ok()) calls->is_made_of(group->get());
  calls->leaves(0, group.status(), true);
  if (!group.ok()) return verdict_->cause_of(group.status());
  if ((*group)->kind() == TransportKind::kFake) {
    calls->ends();
    return group;
  }
  return std::make_shared<ObservedCollectives<GroupCalls>>(calls, *std::move(group));
}

bool CallWatch::pause(std::chrono::milliseconds time) {
  const auto end = Clock::now() + time;
  const MutexLock lock(mutex_);
  while (!ends_ && changed_.wait_until(mutex_, end)) continue;
  return !ends_;
}

void CallWatch::run() {
  do {
    if (next_.rank) next_.rank->take_watchers();
    look_after_next();
    look_after_first();
    store_has_vanished_ = questions_ > 0 && (host_has_vanished_ || first_has_vanished());
  } while (pause(kBetweenLooks) && look());
}

void CallWatch::look_after_next() {
  if (!next_.rank || next_.is_done || !connect()) return;
  NextRank& rank = *next_.rank;
  if (!rank.is_watched()) return find(next_);
  if (!rank.has_ended()) {
    host_has_vanished_ = false;  // the host answered again before other ranks were told
    return next_.ended.reset();
  }
  if (!next_.ended) next_.ended = Clock::now();
  const auto since = Clock::now() - *next_.ended;
  if (rank.has_ended_well()) {  // a report that is too long never comes whole
    if (hear_end(rank) || since >= kToReturn) pass_over_next();
    return;
  }
  // If a host has vanished, this rank does not wait for the other ranks of that host.
  if (rank.is_connected() && since < (rank.is_silent() ? silence_ : std::chrono::milliseconds(kForLastCalls))) return;
  host_has_vanished_ = rank.is_silent();
  const bool is_told = ask_in_time(connection_, [key = key_of_gone_rank(rank.rank())](KeyValueStore& store) {
    store.set(key, "").IgnoreError();
    store.set(kAnyGoneRank, "").IgnoreError();
  });
  if (!is_told) return;
  next_.is_done = !host_has_vanished_ || !rank.go_on();
  next_.ended.reset();
  next_.tries = 0;
}

// The watch stays on rank 0, since first_has_ended_well asks for its end, and the store has ended with it.
void CallWatch::pass_over_next() {
  next_.has_gone_on = true;
  next_.is_done = next_.rank->rank() == 0 || !next_.rank->go_on();
  next_.ended.reset();
  next_.tries = 0;
}

void CallWatch::look_after_first() {
  if (!first_.rank) return;
  if (!first_.is_done && connect() && !first_.rank->is_watched()) find(first_);
  hear_end(*first_.rank);
}

bool CallWatch::hear_end(const NextRank& rank) {
  if (ended_.contains(rank.rank())) return true;
  const std::string text = rank.end_report();
  if (text.empty()) return false;
  std::optional<WaitReport> report = WaitReport::from_text(text);
  if (!report) return false;
  report->rank = rank.rank();
  ended_[rank.rank()] = *std::move(report);
  ask_in_time(connection_, [text, key = key_of(rank.rank())](KeyValueStore& store) {
    store.set(key, text).IgnoreError();  // it fails if rank 0 has ended, which others watch too
  });
  return true;
}

void CallWatch::find(WatchedRank& watched) {
  const auto places = std::make_shared<NextRank::Places>(watched.rank->places());
  const bool is_answered = ask_in_time(connection_, [places](KeyValueStore& store) { places->exchange(store); });
  const bool is_known = is_answered && !places->next.empty();
  if (is_known) watched.rank->connect(places->next);
  // A port that keeps silent may be in an outage, and each try takes a second.
  watched.tries += is_known ? kMostTries / 10 : 1;
  const bool may_come = (!is_known || watched.rank->is_silent()) && watched.tries <= kMostTries;
  watched.is_done = !watched.rank->is_watched() && !may_come;
  // The rank after one that has ended well may have ended well itself by now.
  if (is_known && watched.is_done && watched.has_gone_on && !watched.rank->is_silent()) pass_over_next();
}

bool CallWatch::first_has_ended_well() const {
  const WatchedRank& first = first_.rank ? first_ : next_;
  return first.rank && first.rank->rank() == 0 && first.rank->has_ended_well();
}

bool CallWatch::first_has_vanished() {
  if (!first_.rank || !first_.rank->is_watched()) return false;
  const bool is_silent = first_.rank->has_ended() && first_.rank->is_silent();
  if (!is_silent) first_.ended.reset();
  if (is_silent && !first_.ended) first_.ended = Clock::now();
  return is_silent && Clock::now() - *first_.ended >= silence_;
}

void CallWatch::tell_end() const {
  if (!next_.rank || getpid() != process_) return;
  WaitReport report;
  report.rank = rank_;
  report.has_ended = true;
  {
    const MutexLock lock(mutex_);
    for (const Watched& watched : watched_) {
      WaitReport::Group group = watched.calls->report();
      group.latest.clear();
      report.groups[watched.calls->name()] = std::move(group);
    }
  }
  next_.rank->tell_end(report.to_text());
}

bool CallWatch::ask_store(const std::shared_ptr<KeyValueStore>& store, std::function<void(KeyValueStore&)> questions,
                          std::chrono::milliseconds limit) {
  ++questions_;
  const bool is_answered =
      ask_in_time(store, std::move(questions), limit, [this] { return store_has_vanished_.load(); });
  --questions_;
  return is_answered;
}

absl::StatusOr<bool> CallWatch::has_key(const std::string& key) {
  const auto found = std::make_shared<absl::StatusOr<bool>>(false);
  const auto question = [key, found](KeyValueStore& store) { *found = store.has(key); };
  // The groups' own connection may be in use by the call in which the program waits.
  if (!connect() || !ask_in_time(connection_, question)) return host_has_vanished_ || first_has_vanished();
  if (found->ok()) {
    if (!**found || !key.starts_with(std::string(kAnyGoneRank) + "/")) return *found;
    return Clock::now() - gone_since_.try_emplace(key, Clock::now()).first->second >= kToReturn;
  }
  if (connection_ != store_) {  // this connection has ended, but the store may still answer
    connection_ = store_;
    return false;
  }
  if (first_has_ended_well()) return false;  // rank 0 has done its part of the calls that other ranks are still in
  if (!store_ended_) store_ended_ = Clock::now();
  return Clock::now() - *store_ended_ < kForLastCalls ? absl::StatusOr<bool>(false) : *found;
}

bool CallWatch::look() {
  if (!waits_long()) {
    take_back();
    return true;
  }
  if (!is_due()) return true;
  const WaitReport own = report();
  const auto exchange = std::make_shared<Exchange>();
  exchange->own = own.to_text();
  exchange->others = others();
  if (!ask(exchange)) {  // no answer: the store hangs (comm.timeout_s ends the call), or its host has vanished
    end_lonely_calls();
    return true;
  }
  // An outage that is over does not count towards the next one, and rank 0 is watched over another connection after it.
  if (questions_ == 0 && first_.rank && first_.rank->is_watched() && !first_.rank->has_ended()) first_.ended.reset();
  if (exchange->verdict.empty()) {
    std::vector<WaitReport> reports = {own};
    for (const std::string& text : exchange->texts)
      if (auto other = WaitReport::from_text(text)) reports.push_back(*std::move(other));
    for (const auto& [rank, last] : ended_) reports.push_back(last);
    const std::string found = std::exchange(found_, disagreement_of(reports));
    if (found_.empty()) end_lonely_calls();
    if (found_.empty() || found_ != found) return true;
    exchange->finding = (has_outside_wait(reports) ? kWithOutside : kOwnAlone) + found_ + kHint;
    if (!ask(exchange)) return true;
    // The store has ended with rank 0, so each rank finds this out by itself.
    if (exchange->verdict.empty() && ended_.contains(0)) exchange->verdict = exchange->finding;
    if (exchange->verdict.empty()) return true;
  }
  const absl::Status verdict =
      make_error(ExitCode::kInternal, "rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) + ": " +
                                          exchange->verdict.substr(1));
  verdict_->set(verdict);
  // A rank that ends first looks like a lost peer to ranks that have not heard the verdict. If a rank waits in another
  // library, that library sees a lost peer too. A rank that waits in another library therefore ends first.
  std::chrono::milliseconds others_need = world_size_ <= kManyRanks ? kForOthersToHear : 2 * kForOthersToHear;
  if (exchange->verdict.front() == kWithOutside && waits_) others_need += kForOthersToHear;
  if (pause(others_need)) end_with(verdict);
  return false;
}

bool CallWatch::waits_long() {
  const MutexLock lock(mutex_);
  const Clock::time_point now = Clock::now();
  bool waits = false;
  for (Watched& watched : watched_) {
    const std::uint64_t place = watched.calls->place();
    if (std::exchange(watched.place, place) != place || place == 0) watched.since = now;
    waits = waits || now - watched.since >= kLong;
  }
  waits_ = waits;
  return waits || (hears_of_outside() && !outside_.waits.empty());
}

void CallWatch::end_lonely_calls() {
  std::vector<Watched> waits;
  {
    const MutexLock lock(mutex_);
    for (const Watched& watched : watched_)
      if (watched.place != 0 && Clock::now() - watched.since >= kLong) waits.push_back(watched);
  }
  for (const Watched& waiting : waits) {
    if (!waiting.calls->end_if_left_alone([this](const std::string& key) { return has_key(key); })) continue;
    const auto end = Clock::now() + kForTheProgram;
    while (waiting.calls->place() == waiting.place) {
      if (!pause(50ms)) return;
      if (Clock::now() < end) continue;
      exit_with(
          make_error(ExitCode::kPeerLost,
                     "rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) + " " +
                         waiting.calls->describe(waiting.place).text +
                         ": another rank of the group has failed. [T0895] hint: what that rank printed last, or its "
                         "launcher, says why"));
    }
  }
}

// Forgets groups that no longer exist, except the latest ones, since other ranks may still be in the last calls of
// these groups.
void CallWatch::forget_old_groups() {
  std::size_t gone = 0;
  for (std::size_t i = watched_.size(); i-- > 0;) {
    const GroupCalls& calls = *watched_[i].calls;
    if (calls.place() == 0 && !calls.lives() && ++gone > kGoneGroups)
      watched_.erase(watched_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

WaitReport CallWatch::report() {
  const MutexLock lock(mutex_);
  WaitReport report;
  report.rank = rank_;
  const Clock::time_point now = Clock::now();
  for (const Watched& watched : watched_) {
    report.groups[watched.calls->name()] = watched.calls->report();
    if (watched.place == 0 || now - watched.since < kLong) continue;
    WaitReport::Wait wait = watched.calls->describe(watched.place);
    if (watched.calls->place() == watched.place) report.waits.push_back(std::move(wait));
  }
  if (!hears_of_outside()) return report;
  report.groups.insert(outside_.groups.begin(), outside_.groups.end());
  report.waits.insert(report.waits.end(), outside_.waits.begin(), outside_.waits.end());
  return report;
}

std::vector<int> CallWatch::others() const {
  std::vector<int> ranks;
  const int count = world_size_ <= kManyRanks ? world_size_ - 1 : kNeighbours;
  for (int i = 1; i <= count; ++i) ranks.push_back((rank_ + i) % world_size_);
  if (rank_ != 0 && std::find(ranks.begin(), ranks.end(), 0) == ranks.end()) ranks.push_back(0);
  return ranks;
}

bool CallWatch::is_due() {
  const Clock::time_point now = Clock::now();
  if (!exchanging_since_) exchanging_since_ = now;
  const bool is_often = now - *exchanging_since_ < kOften;
  if (!is_often && now - last_exchange_ < (world_size_ <= kManyRanks ? 1s : 2s)) return false;
  last_exchange_ = now;
  return true;
}

bool CallWatch::connect() {
  if (connection_) return true;
  const auto made = std::make_shared<std::shared_ptr<KeyValueStore>>();
  if (!ask_in_time(store_, [made](KeyValueStore& store) { *made = store.connected_anew(); })) return false;
  connection_ = *made ? *made : store_;
  return true;
}

bool CallWatch::ask(const std::shared_ptr<Exchange>& exchange) {
  exchange->key = key_of(rank_);
  exchange->writes = exchange->own != published_;
  if (!connect() || !ask_in_time(connection_, [exchange](KeyValueStore& store) { exchange->run(store); })) return false;
  published_ = exchange->own;
  return true;
}

void CallWatch::take_back() {
  exchanging_since_.reset();
  found_.clear();
  // The end of a peer that was seen during an earlier wait does not shorten the time of the next wait.
  store_ended_.reset();
  if (questions_ == 0) first_.ended.reset();
  if (published_.empty()) return;
  const auto nothing = std::make_shared<Exchange>();
  ask(nothing);
}

void CallWatch::end_with(const absl::Status& verdict) {
  // A call of another library does not end when the mesh ends. A program that hears that the mesh has ended may close
  // objects for which the other library's call waits.
  const bool is_own = waits_;
  const auto end = Clock::now() + (is_own ? kForTheProgram : kForOutside);
  if (is_own) report_(verdict);
  const auto is_out = [&] {
    const MutexLock lock(mutex_);
    const bool is_outside = hears_of_outside() && !outside_.waits.empty();
    return !is_outside && std::all_of(watched_.begin(), watched_.end(), [](const Watched& watched) {
      return watched.place % 2 == 0 || watched.calls->place() != watched.place;
    });
  };
  do {
    const bool is_over = is_out();
    if (is_over && !is_own) report_(verdict);
    if (is_over || !pause(50ms)) return;
  } while (Clock::now() < end);
  exit_with(verdict);
}

}  // namespace tessera
