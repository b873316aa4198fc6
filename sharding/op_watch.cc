#include "sharding/op_watch.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sharding/gather_log.h"
#include "sharding/unit.h"
#include "sharding/unit_keeper.h"

namespace tessera {
namespace {

/// Blocks of `kBytes` that a thread gives out again and again: the heap is asked only while operators nest deeper.
template <std::size_t kBytes>
class SpareBlocks {
 public:
  ~SpareBlocks() {
    for (void* block : spare_) ::operator delete(block);
  }
  void* take() {
    if (spare_.empty()) return ::operator new(kBytes);
    void* block = spare_.back();
    spare_.pop_back();
    return block;
  }
  void give_back(void* block) { spare_.push_back(block); }

 private:
  std::vector<void*> spare_;
};

/// The units that a running operator reads. One comes and goes with every operator that reads any.
struct PinnedUnits : at::ObserverContext {
  ~PinnedUnits() override {
    for (Unit* unit : units) unit->keeper()->unpin(*unit);
  }
  static void* operator new(std::size_t);
  static void operator delete(void* block);

  c10::SmallVector<Unit*, 4> units;
};

thread_local SpareBlocks<sizeof(PinnedUnits)> spare_blocks;

void* PinnedUnits::operator new(std::size_t) { return spare_blocks.take(); }
void PinnedUnits::operator delete(void* block) { spare_blocks.give_back(block); }

using Units = c10::SmallVector<Unit*, 4>;

/// Appends the units that `value` belongs to.
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

/// Whether all that an operator returns is its inputs' memory, by its schema: (a) there, and not (a!), which it writes.
bool returns_views(const c10::FunctionSchema& schema) {
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_view);
}

/// An operator that returns views reads no memory. Some of them (to, contiguous, reshape) copy where they cannot view, and do so by
/// operators of their own. So nothing is gathered for a view: `state_dict()`, which one rank may call alone, would else wait for the others.
bool reads_nothing(const at::RecordFunction& function) {
  thread_local std::unordered_map<std::string_view, bool> known;
  // Names are text of the schema, which lives as long as its operator: so a copy is kept here.
  thread_local std::deque<std::string> names;
  const std::string_view name = function.name();
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  // Autograd's part of detach is seen as an operator too, under this name, without a schema.
  if (!schema) return name == "detach";
  return known.emplace(names.emplace_back(name), returns_views(*schema)).first->second;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  Units units;
  for (const c10::IValue& input : function.inputs()) find_units(input, units);
  if (units.empty() || reads_nothing(function)) return nullptr;
  std::unique_ptr<PinnedUnits> pinned;
  for (Unit* unit : units) {
    if (unit->keeper()) {
      if (!pinned) pinned = std::make_unique<PinnedUnits>();
      pinned->units.push_back(unit);
      unit->keeper()->use_or_poison(*unit);
    }
    if (unit->use_log) unit->use_log->note_use(unit->index);
  }
  return pinned;
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {}  // the context's destructor unpins

std::mutex watchers_mutex;
int watchers = 0;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

}  // namespace

OpWatch::OpWatch() {
  const std::lock_guard lock(watchers_mutex);
  if (watchers++ > 0) return;
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_start, &on_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

OpWatch::~OpWatch() {
  const std::lock_guard lock(watchers_mutex);
  if (--watchers == 0) at::removeCallback(handle);
}

}  // namespace tessera
