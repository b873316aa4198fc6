#include "engine/training/flop_counter.h"

#include <ATen/record_function.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

struct FlopCounter::Count {
  const std::thread::id thread = std::this_thread::get_id();
  std::atomic<std::int64_t> flop = 0;

  /// All flop counters of the process, and the callback that adds to them.
  struct All {
    Mutex mutex;
    std::vector<Count*> counts ABSL_GUARDED_BY(mutex);
    at::CallbackHandle handle ABSL_GUARDED_BY(mutex) = at::INVALID_CALLBACK_HANDLE;
  };
  static All& all() {
    static All& counters = *new All;
    return counters;
  }
  static void add(std::int64_t flop);
};

namespace {

thread_local bool has_made_one = false;  // whether this thread has made a counter; such a thread trains
thread_local int depth = 0;              // number of counted operators inside which this thread is now

/// An operator that has a formula. It is counted when it has ended without an exception. (torch.utils.checkpoint ends
/// its last recomputed operator by an exception, before that operator computes anything.)
struct CountedOperator final : at::ObserverContext {
  explicit CountedOperator(std::int64_t flop_given) : flop(flop_given) {}
  const std::int64_t flop;
  const int exceptions = std::uncaught_exceptions();
};

}  // namespace

void FlopCounter::Count::add(std::int64_t flop) {
  All& counters = all();
  const MutexLock lock(counters.mutex);
  for (Count* count : counters.counts) {
    if (!has_made_one || count->thread == std::this_thread::get_id()) count->flop += flop;
  }
}

FlopCounter::FlopCounter() : count_(std::make_unique<Count>()) {
  has_made_one = true;
  const auto begin = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    const FlopFormula formula = flop_formula_of(function.name());
    if (!formula) return nullptr;
    auto counted = std::make_unique<CountedOperator>(depth == 0 ? formula(function.inputs()) : 0);
    ++depth;
    return counted;
  };
  const auto end = [](const at::RecordFunction&, at::ObserverContext* context) {
    if (!context) return;
    --depth;
    const auto& counted = static_cast<const CountedOperator&>(*context);
    if (std::uncaught_exceptions() == counted.exceptions) Count::add(counted.flop);
  };
  Count::All& counters = Count::all();
  const MutexLock lock(counters.mutex);
  counters.counts.push_back(count_.get());
  if (counters.counts.size() > 1) return;
  counters.handle = at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

FlopCounter::~FlopCounter() {
  Count::All& counters = Count::all();
  const MutexLock lock(counters.mutex);
  std::erase(counters.counts, count_.get());
  if (counters.counts.empty()) at::removeCallback(counters.handle);
}

std::int64_t FlopCounter::counted() const { return count_->flop; }
void FlopCounter::clear() { count_->flop = 0; }

FlopCounter::Pause::Pause(FlopCounter* counter) : counter_(counter), before_(counter ? counter->counted() : 0) {}
FlopCounter::Pause::~Pause() {
  if (counter_) counter_->count_->flop = before_;
}

}  // namespace tessera
