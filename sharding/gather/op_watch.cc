#include "sharding/gather/op_watch.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "runtime/base/mutex.h"
#include "sharding/gather/data_wait.h"
#include "sharding/gather/function_watch.h"
#include "sharding/gather/pinned_units.h"
#include "sharding/unit.h"

namespace tessera {
namespace {

/// Appends the units to which `value` belongs.
void find_units(const c10::IValue& value, Units& found) {
  if (value.isTensor()) {
    if (Unit* const unit = unit_of(value.toTensor())) found.push_back(unit);
  } else if (value.isList()) {
    if (value.isIntList() || value.isDoubleList() || value.isBoolList()) return;
    for (const c10::IValue& element : value.toListRef()) find_units(element, found);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) find_units(element, found);
  }
}

/// Returns whether all results of an operator are views of its inputs. A schema marks a view with (a). The results of
/// an operator in place, which a schema marks with (a!), do not count as views.
bool returns_views(const c10::FunctionSchema& schema) {
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_view);
}

/// The kinds of functions that RecordFunction shows.
enum class Seen : std::uint8_t {
  /// An operator that returns views and reads no memory. If some of these operators (to, contiguous, reshape) cannot
  /// return a view, they copy by calling other operators. Nothing is gathered for a view. Otherwise `state_dict()`,
  /// which a single rank may call, would wait for the other ranks.
  kView,
  kOperator,  ///< an operator that reads its inputs
  kFunction,  ///< an autograd function of Python, which has no schema
};

Seen what_is(const at::RecordFunction& function) {
  thread_local std::unordered_map<std::string_view, Seen> known;
  // A name is text of the operator's schema, which lives only as long as the operator, so a copy is kept here.
  thread_local std::deque<std::string> names;
  const std::string_view name = function.name();
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  // Autograd's part of detach is also shown as an operator, under this name and without a schema.
  if (!schema) return name == "detach" ? Seen::kView : Seen::kFunction;
  const Seen seen = returns_views(*schema) ? Seen::kView : Seen::kOperator;
  return known.emplace(names.emplace_back(name), seen).first->second;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  Units units;
  for (const c10::IValue& input : function.inputs()) find_units(input, units);
  if (units.empty()) return nullptr;
  const Seen seen = what_is(function);
  if (seen == Seen::kView) return nullptr;
  DataWait::parameter_is_read();
  if (seen == Seen::kFunction) note_function(function, units);
  return pin(units);
}

void on_operator_end(const at::RecordFunction&, at::ObserverContext*) {}  // the context's destructor unpins the units

Mutex watchers_mutex;
int watchers ABSL_GUARDED_BY(watchers_mutex) = 0;
at::CallbackHandle handle ABSL_GUARDED_BY(watchers_mutex) = at::INVALID_CALLBACK_HANDLE;
std::atomic<bool> is_watched = false;  // whether there are watchers, for readers without the lock

thread_local at::CallbackHandle first_read = at::INVALID_CALLBACK_HANDLE;

/// It is called like on_start, but pins no units, since no UnitKeeper gathers the units that it finds.
std::unique_ptr<at::ObserverContext> on_first_read(const at::RecordFunction& function) {
  Units units;
  for (const c10::IValue& input : function.inputs()) find_units(input, units);
  if (units.empty() || what_is(function) == Seen::kView) return nullptr;
  DataWait::parameter_is_read();
  forget_first_read();
  return nullptr;
}

}  // namespace

bool watch_for_first_read(bool looks) {
  if (first_read != at::INVALID_CALLBACK_HANDLE || is_watched.load(std::memory_order_relaxed)) return true;
  if (!looks) return false;
  first_read = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_first_read, &on_operator_end)
                                              .needsInputs(true)
                                              .scopes({at::RecordScope::FUNCTION}));
  return true;
}

void forget_first_read() {
  if (first_read == at::INVALID_CALLBACK_HANDLE) return;
  at::removeCallback(std::exchange(first_read, at::INVALID_CALLBACK_HANDLE));
}

OpWatch::OpWatch() {
  const MutexLock lock(watchers_mutex);
  if (watchers++ > 0) return;
  is_watched = true;
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_start, &on_operator_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

OpWatch::~OpWatch() {
  const MutexLock lock(watchers_mutex);
  if (--watchers > 0) return;
  is_watched = false;
  at::removeCallback(handle);
}

}  // namespace tessera
