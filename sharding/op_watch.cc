#include "sharding/op_watch.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <mutex>
#include <new>
#include <string_view>
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

void gather_and_pin(Unit& unit, std::unique_ptr<PinnedUnits>& pinned) {
  if (!pinned) pinned = std::make_unique<PinnedUnits>();
  pinned->units.push_back(&unit);
  unit.keeper()->use_or_poison(unit);
}

void visit(const c10::IValue& value, std::unique_ptr<PinnedUnits>& pinned) {
  if (value.isTensor()) {
    Unit* const unit = unit_of(value.toTensor());
    if (!unit) return;
    if (unit->keeper()) gather_and_pin(*unit, pinned);
    if (unit->use_log) unit->use_log->note_use(unit->index);
  } else if (value.isList()) {
    if (value.isIntList() || value.isDoubleList() || value.isBoolList()) return;
    for (const c10::IValue& element : value.toListRef()) visit(element, pinned);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) visit(element, pinned);
  }
}

/// Operators that return their input, or another tensor over its memory, and read none of it. What they do beyond that they do by
/// operators of their own. Without this, `p.detach().cpu().numpy()` would be a view of memory that the next unit gets.
bool reads_nothing(std::string_view name) {
  // Autograd's part of detach is seen as an operator too, under this name.
  return name == "aten::detach" || name == "detach" || name == "aten::alias" || name == "aten::to" ||
         name == "aten::contiguous";
}

bool has_unit(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  return !inputs.empty() && inputs[0].isTensor() && unit_of(inputs[0].toTensor()) != nullptr;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (has_unit(function) && reads_nothing(function.name())) return nullptr;
  std::unique_ptr<PinnedUnits> pinned;
  for (const c10::IValue& input : function.inputs()) visit(input, pinned);
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
