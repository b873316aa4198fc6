#include "runtime/comm/call_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/rank_name.h"
#include "runtime/base/status.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/observed_collectives.h"

// Finds deadlocks between ranks. GroupCalls records, without a lock, which call of one group the program is in.
// CallWatch's thread looks at all groups twice a second (`look`). After a call has taken 3 s, the thread exchanges
// reports with other ranks through the store (Reports). It looks for a proof of a deadlock in these reports
// (disagreement_of). It publishes the proof as the verdict when it has found the same proof twice in a row. A rank that
// reads the verdict waits until the other ranks can have read it too, and ends its program's call (`end_with`).

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenLooks = 500ms;
constexpr auto kOften = 10s;           // ranks exchange reports at each `look` for this long, then less often
constexpr auto kForOthersToHear = 1s;  // time of other ranks to read the verdict, beyond the time between exchanges
constexpr auto kForOutsideFirst = 2s;  // Tessera's call ends this much later than another library's
constexpr auto kForTheProgram = 4s;    // time in which the program must leave a call that has failed
constexpr auto kForOutside = 500ms;    // time to leave another library's call, which has not failed
constexpr char kWithOutside = '+', kOwnAlone = '-';  // the first character of a verdict in the store
constexpr int kManyRanks = 16, kNeighbours = 4;
constexpr std::size_t kGoneGroups = 32;

/// Returns the time between two exchanges of reports after kOften.
constexpr std::chrono::milliseconds between_exchanges(int world_size) { return world_size <= kManyRanks ? 1s : 2s; }

constexpr const char* kVerdict = "waits/verdict";
constexpr const char* kHint =
    "; every rank must make the same calls in the same order. [T0448] hint: where one rank alone evaluates, saves, "
    "samples, takes a norm, skips a backward, returns early or runs one batch more, let every rank do it, and use what "
    "one rank needs on that rank only. On one machine, `tessera launch --strict` shows such a program";

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

// Remembers a thread that makes calls. The thread that made the group is remembered until the group's first call.
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

/// The exchange of reports with other ranks through the store, while this rank waits long.
class CallWatch::Reports {
 public:
  Reports(int rank, int world_size, OwnConnection& store) : rank_(rank), world_size_(world_size), store_(store) {}

  /// Returns whether reports are to be exchanged now: always in the first seconds of a wait, later less often.
  bool is_due();

  /// The verdict and the reports that the store has.
  struct Answer {
    std::string verdict;
    std::vector<WaitReport> others;  ///< reports of other ranks; empty if there is a verdict
  };
  /// Publishes this rank's report, and a finding unless it is "". Returns nothing if the store does not answer.
  std::optional<Answer> exchange(const std::string& own, const std::string& finding);
  /// Notes that the wait is over, and removes this rank's report from the store.
  void take_back();

 private:
  struct Questions;
  std::vector<int> others() const;

  const int rank_, world_size_;
  OwnConnection& store_;
  std::string published_;                   ///< the report that the store has of this rank
  std::optional<Clock::time_point> since_;  ///< time of the wait's first `is_due`
  Clock::time_point last_ = {};
};

/// The requests to the store in one exchange, and the answers.
struct CallWatch::Reports::Questions {
  std::string key, own;
  bool writes = false;
  std::string finding;
  std::vector<int> others;
  std::string verdict = {};
  std::vector<std::string> texts = {};

  void run(KeyValueStore& store) {
    if (writes) store.set(key, own).IgnoreError();
    if (!finding.empty() && store.add("waits/verdicts", 1).value_or(0) == 1) store.set(kVerdict, finding).IgnoreError();
    if (const auto text = store.get(kVerdict, 0ms); text.ok()) verdict = *text;
    if (!verdict.empty()) return;
    for (const int rank : others)
      if (auto text = store.get(key_of_report(rank), 0ms); text.ok()) texts.push_back(*std::move(text));
  }
};

bool CallWatch::Reports::is_due() {
  const Clock::time_point now = Clock::now();
  if (!since_) since_ = now;
  const bool is_often = now - *since_ < kOften;
  if (!is_often && now - last_ < between_exchanges(world_size_)) return false;
  last_ = now;
  return true;
}

std::vector<int> CallWatch::Reports::others() const {
  std::vector<int> ranks;
  const int count = world_size_ <= kManyRanks ? world_size_ - 1 : kNeighbours;
  for (int i = 1; i <= count; ++i) ranks.push_back((rank_ + i) % world_size_);
  if (rank_ != 0 && std::find(ranks.begin(), ranks.end(), 0) == ranks.end()) ranks.push_back(0);
  return ranks;
}

std::optional<CallWatch::Reports::Answer> CallWatch::Reports::exchange(const std::string& own,
                                                                       const std::string& finding) {
  const auto questions = std::make_shared<Questions>(
      Questions{key_of_report(rank_), own, own != published_, finding, own.empty() ? std::vector<int>() : others()});
  if (!store_.ask([questions](KeyValueStore& store) { questions->run(store); })) return std::nullopt;
  published_ = own;
  Answer answer{questions->verdict, {}};
  for (const std::string& text : questions->texts)
    if (auto other = WaitReport::from_text(text)) answer.others.push_back(*std::move(other));
  return answer;
}

void CallWatch::Reports::take_back() {
  since_.reset();
  if (!published_.empty()) exchange("", "");
}

CallWatch::CallWatch(int rank, int world_size, const std::shared_ptr<KeyValueStore>& store, Report report)
    : rank_(rank),
      world_size_(world_size),
      report_(std::move(report)),
      process_(getpid()),
      connection_(store),
      ranks_(rank, world_size, store->own_address(), connection_),
      reports_(std::make_unique<Reports>(rank, world_size, connection_)) {}

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

int CallWatch::number_of(pthread_t thread) {
  static Mutex mutex;
  static std::map<pthread_t, int> numbers ABSL_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  return numbers.try_emplace(thread, static_cast<int>(numbers.size()) + 1).first->second;
}

void CallWatch::tell(OutsideCalls calls) {
  const MutexLock lock(mutex_);
  outside_.tell(std::move(calls));
}

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
    ranks_.look();
    store_has_vanished_ = questions_ > 0 && ranks_.has_host_vanished();
  } while (pause(kBetweenLooks) && look());
}

void CallWatch::tell_end() const {
  if (!ranks_.has_ranks() || getpid() != process_) return;
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
  ranks_.tell_end(report);
}

bool CallWatch::ask_store(const std::shared_ptr<KeyValueStore>& store, std::function<void(KeyValueStore&)> questions,
                          std::chrono::milliseconds limit) {
  ++questions_;
  const bool is_answered =
      ask_in_time(store, std::move(questions), limit, [this] { return store_has_vanished_.load(); });
  --questions_;
  return is_answered;
}

bool CallWatch::look() {
  if (!waits_long()) {
    take_back();
    return true;
  }
  if (!reports_->is_due()) return true;
  const WaitReport own = report();
  std::optional<Reports::Answer> answer = reports_->exchange(own.to_text(), "");
  if (!answer) {  // no answer: the store hangs (comm.timeout_s ends the call), or its host has vanished
    end_lonely_calls();
    return true;
  }
  // An outage that is over does not count towards the next outage. Rank 0 is watched over another connection
  // afterwards.
  if (questions_ == 0) ranks_.end_silence();
  if (answer->verdict.empty()) {
    std::vector<WaitReport> reports = std::move(answer->others);
    reports.insert(reports.begin(), own);
    for (const auto& [rank, last] : ranks_.ended()) reports.push_back(last);
    const std::string found = std::exchange(found_, disagreement_of(reports));
    if (found_.empty()) end_lonely_calls();
    if (found_.empty() || found_ != found) return true;
    const std::string finding = (has_outside_wait(reports) ? kWithOutside : kOwnAlone) + found_ + kHint;
    answer = reports_->exchange(own.to_text(), finding);
    if (!answer) return true;
    // The store has ended with rank 0, so each rank finds this out by itself.
    if (answer->verdict.empty() && ranks_.ended().contains(0)) answer->verdict = finding;
    if (answer->verdict.empty()) return true;
  }
  const absl::Status verdict =
      make_error(ExitCode::kInternal, rank_name(rank_, world_size_) + ": " + answer->verdict.substr(1));
  verdict_->set(verdict);
  // A rank that ends first looks like a lost peer to ranks that have not read the verdict. If a rank waits in another
  // library, that library sees a lost peer too. A rank that waits in another library therefore ends first.
  std::chrono::milliseconds others_need = between_exchanges(world_size_) + kForOthersToHear;
  if (answer->verdict.front() == kWithOutside && waits_) others_need += kForOutsideFirst;
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
  return waits || outside_.has_waits();
}

void CallWatch::end_lonely_calls() {
  std::vector<Watched> waits;
  {
    const MutexLock lock(mutex_);
    for (const Watched& watched : watched_)
      if (watched.place != 0 && Clock::now() - watched.since >= kLong) waits.push_back(watched);
  }
  for (const Watched& waiting : waits) {
    if (!waiting.calls->end_if_left_alone([this](const std::string& key) { return ranks_.has_key(key); })) continue;
    const auto end = Clock::now() + kForTheProgram;
    while (waiting.calls->place() == waiting.place) {
      if (!pause(50ms)) return;
      if (Clock::now() < end) continue;
      exit_with(
          make_error(ExitCode::kPeerLost,
                     rank_name(rank_, world_size_) + " " + waiting.calls->describe(waiting.place).text +
                         ": another rank of the group has failed. [T0895] hint: what that rank printed last, or its "
                         "launcher, says why"));
    }
  }
}

// Forgets groups that no longer exist, except the kGoneGroups latest of them. Other ranks may still be in their last
// calls.
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
  if (const OutsideCalls* const outside = outside_.calls()) {
    report.groups.insert(outside->groups.begin(), outside->groups.end());
    report.waits.insert(report.waits.end(), outside->waits.begin(), outside->waits.end());
  }
  return report;
}

void CallWatch::take_back() {
  found_.clear();
  // The end of a peer that was seen during an earlier wait does not shorten the time of the next wait.
  ranks_.end_wait(/*also_of_first=*/questions_ == 0);
  reports_->take_back();
}

void CallWatch::end_with(const absl::Status& verdict) {
  // A call of another library does not end when the mesh ends. A program that notices the end of the mesh may close
  // objects for which the other library's call waits.
  const bool is_own = waits_;
  const auto end = Clock::now() + (is_own ? kForTheProgram : kForOutside);
  if (is_own) report_(verdict);
  const auto is_out = [&] {
    const MutexLock lock(mutex_);
    return !outside_.has_waits() && std::all_of(watched_.begin(), watched_.end(), [](const Watched& watched) {
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
