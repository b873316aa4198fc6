#include "sharding/observed_pointers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "runtime/base/mutex.h"
#include "sharding/unit.h"
#include "tessera/error.h"
#include "tessera/observe_pointers.h"

namespace tessera {
namespace {

constexpr std::size_t kPiece = 2 << 20;

[[noreturn]] void fail(const char* what) {
  throw Error(ExitCode::kInternal,
              std::string("memory for a profiler's look at parameters: ") + what + ": " + std::strerror(errno));
}

/// Memory in which all bits are ones. One piece is mapped again and again, so that any number of bytes can be read.
class Ones {
 public:
  Ones() : file_(::memfd_create("tessera ones", MFD_CLOEXEC)) {
    if (file_ < 0) fail("memfd_create");
    const std::vector<char> ones(kPiece, '\xff');
    if (::write(file_, ones.data(), kPiece) != static_cast<ssize_t>(kPiece)) fail("write");
  }

  std::byte* of(std::size_t bytes) {
    if (bytes <= bytes_) return memory_;
    const std::size_t wanted = (bytes + kPiece - 1) / kPiece * kPiece;
    void* const memory = ::mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    for (std::size_t at = 0; at < wanted; at += kPiece) {
      void* const piece = static_cast<std::byte*>(memory) + at;
      if (::mmap(piece, kPiece, PROT_READ, MAP_SHARED | MAP_FIXED, file_, 0) == MAP_FAILED) fail("mmap");
    }
    memory_ = static_cast<std::byte*>(memory);  // the old mapping is kept, since code may hold pointers into it
    bytes_ = wanted;
    return memory_;
  }

 private:
  const int file_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Observed {
  Mutex mutex;
  std::vector<Unit*> units ABSL_GUARDED_BY(mutex);
  std::atomic<int> observers = 0;
};

Observed& observed() {
  static Observed& all = *new Observed;  // units may outlive static objects
  return all;
}

}  // namespace

void observe_pointers(bool begins) {
  Observed& all = observed();
  const MutexLock lock(all.mutex);
  all.observers += begins ? 1 : -1;
  for (Unit* unit : all.units) {
    for (auto& group : unit->groups) group->set_access();
  }
}

std::byte* observed_pointer(std::int64_t bytes) {
  if (observed().observers.load(std::memory_order_relaxed) == 0) return nullptr;
  static Mutex mutex;
  static Ones& ones ABSL_GUARDED_BY(mutex) = *new Ones;
  const MutexLock lock(mutex);
  return ones.of(static_cast<std::size_t>(bytes));
}

void add_observed(Unit& unit) {
  Observed& all = observed();
  const MutexLock lock(all.mutex);
  all.units.push_back(&unit);
}

void remove_observed(Unit& unit) {
  Observed& all = observed();
  const MutexLock lock(all.mutex);
  std::erase(all.units, &unit);
}

}  // namespace tessera
