#include "sharding/gather/function_watch.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>

#include "runtime/base/mutex.h"

namespace tessera {
namespace {

/// A function of the graph: the thread that applied it, and its number among that thread's functions.
struct Key {
  std::uint64_t thread = 0;
  std::int64_t number = -1;
  bool operator==(const Key&) const = default;
};

/// The inputs of an applied function. It holds storages instead of units, since a graph may outlive its Engine.
struct Applied {
  Key key;
  c10::SmallVector<c10::weak_intrusive_ptr<c10::StorageImpl>, 4> storages;
};

/// The latest functions that were applied. There are 4096 entries, and a function is forgotten when a later one gets
/// its entry. A forgotten function pins no units, so its reads in backward are refused, and the error names the unit.
class AppliedFunctions {
 public:
  void add(const Key& key, const Units& units) {
    const MutexLock lock(mutex_);
    Applied& entry = entry_of(key);
    entry.key = key;
    entry.storages.clear();
    for (const Unit* unit : units) {
      for (const auto& group : unit->groups) entry.storages.emplace_back(group->storage);
    }
  }

  Units units_of(const Key& key) {
    Units units;
    const MutexLock lock(mutex_);
    const Applied& entry = entry_of(key);
    if (!(entry.key == key)) return units;
    for (const auto& weak : entry.storages) {
      const c10::intrusive_ptr<c10::StorageImpl> storage = weak.lock();
      Unit* const unit = storage ? unit_of(*storage) : nullptr;
      if (unit && (units.empty() || units.back() != unit)) units.push_back(unit);
    }
    return units;
  }

 private:
  Applied& entry_of(const Key& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return entries_[(static_cast<std::uint64_t>(key.number) + key.thread * 977) % entries_.size()];
  }

  Mutex mutex_;
  std::array<Applied, 4096> entries_ ABSL_GUARDED_BY(mutex_);
};

AppliedFunctions& applied() {
  static AppliedFunctions& all = *new AppliedFunctions;
  return all;
}

std::unique_ptr<at::ObserverContext> on_backward(const at::RecordFunction& node) {
  return pin(applied().units_of({node.forwardThreadId(), node.seqNr()}));
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {}  // the destructor of the context unpins the units

}  // namespace

void note_function(const at::RecordFunction& function, const Units& units) {
  if (function.seqNr() < 0 || !at::GradMode::is_enabled()) return;
  // The callback is added only now, so a program without such functions has no cost for each node.
  static const at::CallbackHandle watching = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_backward, &on_end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  static_cast<void>(watching);
  applied().add({function.threadId(), function.seqNr()}, units);
}

}  // namespace tessera
