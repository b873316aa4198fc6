#include "sharding/gather/pinned_units.h"

#include <new>
#include <vector>

#include "sharding/gather/gather_log.h"
#include "sharding/gather/unit_keeper.h"

namespace tessera {
namespace {

/// Blocks of `kBytes` that a thread reuses. A block is allocated only when operators nest deeper than before.
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

thread_local SpareBlocks<sizeof(PinnedUnits)> spare_blocks;

}  // namespace

void* PinnedUnits::operator new(std::size_t) { return spare_blocks.take(); }
void PinnedUnits::operator delete(void* block) { spare_blocks.give_back(block); }

PinnedUnits::~PinnedUnits() {
  for (Unit* unit : units) unit->keeper()->unpin(*unit);
}

std::unique_ptr<PinnedUnits> pin(const Units& units) {
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

}  // namespace tessera
