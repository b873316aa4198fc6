#include "offload/files/fault_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "offload/files/unsynced_files.h"
#include "runtime/base/log.h"

namespace tessera {
namespace {

constexpr int kKilled = 137;  // the code that a shell reports after kill -9

}  // namespace

bool fits_together(FaultSite site, FaultAction action) {
  const bool is_transfer = site == FaultSite::kRead || site == FaultSite::kWrite;
  switch (action) {
    case FaultAction::kShort:
      return is_transfer || site == FaultSite::kCqe;
    case FaultAction::kBitFlip:
      return is_transfer;
    case FaultAction::kTorn:
      return is_transfer || site == FaultSite::kFsync;
    case FaultAction::kDelay:
      return site != FaultSite::kSubmit;
    default:
      return true;
  }
}

FaultPlan::FaultPlan(std::vector<FaultRule> rules) {
  for (FaultRule& rule : rules) {
    if (rule.action == FaultAction::kDropUnsynced && unsynced_ == nullptr)
      unsynced_ = std::make_unique<UnsyncedFiles>();
    rules_.push_back({std::move(rule)});
  }
}

FaultPlan::~FaultPlan() = default;

std::int64_t FaultPlan::operations(FaultSite site) const {
  const MutexLock lock(mutex_);
  return operations_[static_cast<std::size_t>(site)];
}

std::int64_t FaultPlan::faults() const {
  const MutexLock lock(mutex_);
  return faults_;
}

bool FaultPlan::applies(CountedRule& counted, FaultSite site, std::string_view path) {
  const FaultRule& rule = counted.rule;
  if (rule.site != site || path.find(rule.path) == std::string_view::npos) return false;
  const std::int64_t number = ++counted.seen;
  return rule.nth > 0 ? number == rule.nth : rule.every > 0 && number % rule.every == 0;
}

Fault FaultPlan::pass(FaultSite site, std::string_view path) {
  const MutexLock lock(mutex_);
  ++operations_[static_cast<std::size_t>(site)];
  const FaultRule* chosen = nullptr;
  for (CountedRule& counted : rules_)
    if (applies(counted, site, path) && chosen == nullptr) chosen = &counted.rule;
  if (chosen == nullptr || chosen->action == FaultAction::kNone) return {};
  ++faults_;
  if (chosen->action == FaultAction::kCrash) ::_exit(static_cast<int>(chosen->number));
  if (chosen->action == FaultAction::kDropUnsynced) {
    unsynced_->drop(chosen->keep_renames);
    ::_exit(kKilled);
  }
  if (chosen->action == FaultAction::kCall) {
    chosen->call();
    return {};
  }
  return {chosen->action, chosen->number};
}

ScopedFaults::ScopedFaults(std::vector<FaultRule> rules) : plan_(rules) {
  if (!std::ranges::all_of(rules, [](const FaultRule& rule) { return fits_together(rule.site, rule.action); })) {
    log_error("internal bug: a fault's action means nothing at its site");
    std::abort();
  }
  FaultPlan* none = nullptr;
  if (!installed_fault_plan.compare_exchange_strong(none, &plan_, std::memory_order_acq_rel)) {
    log_error("internal bug: two fault plans are installed at once");
    std::abort();
  }
}

ScopedFaults::~ScopedFaults() { installed_fault_plan.store(nullptr, std::memory_order_release); }

}  // namespace tessera
