// Lets the n-th allocation above a certain size fail, for every n in a run of two ranks: set-up, steps, a checkpoint.
// Each time, both ranks end with an error that names the lack of memory, and they leave nothing behind that would
// disturb the next run.

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

/// The smallest allocation that may fail, in bytes. Texts are smaller, and streams and logs continue without texts for
/// which there is no memory.
constexpr std::size_t kSmallest = 8192;

/// The number of allocations that remain until one fails; 0: none will fail.
std::atomic<std::int64_t> left{0};
std::atomic<std::int64_t> failed{0};

bool fails(std::size_t bytes) {
  if (bytes < kSmallest || left.load(std::memory_order_relaxed) <= 0) return false;
  if (left.fetch_sub(1) != 1) return false;
  ++failed;
  return true;
}

/// LibTorch's allocator for tensors, which may fail.
class FailingHeap final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, !fails(bytes), "not enough memory for a CPU tensor of ", bytes, " bytes");
    void* const data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    return {data, data, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace
}  // namespace tessera::testing

// These operators allocate vectors and the like, and training state.
void* operator new(std::size_t bytes) {
  void* const memory = tessera::testing::fails(bytes) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" void* mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (tessera::testing::fails(bytes)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}

namespace tessera::testing {
namespace {

/// Returns the error of a run of two ranks whose `nth` allocation fails. It is empty if the run makes fewer
/// allocations.
std::string failure_of(const Placed& placed, std::int64_t nth, Values* values = nullptr) {
  const TestFolder folder;
  failed = 0;
  std::string text;
  try {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_of(kKept[2], placed, placed.on_disk ? &kSomeBelow : nullptr);
      if (mesh.rank() == 0) left = nth;
      Session session(mesh, strategy, kWide);
      for (std::size_t i = 0; i < 2; ++i) session.train(i);
      save_checkpoint(session.engine, folder.path());
      const Values own = session.values();
      if (values && mesh.rank() == 0) *values = own;
    });
  } catch (const Error& error) {
    EXPECT_TRUE(error.exit_code() == ExitCode::kOsResource || error.exit_code() == ExitCode::kInternal) << error.what();
    text = error.what();
  } catch (const std::exception& error) {
    text = error.what();
  }
  left = 0;
  EXPECT_EQ(text.empty(), failed == 0) << nth << ": " << text;
  return text;
}

TEST(FailedAllocations, EveryFailedAllocationIsAnErrorAndTrainingCanStartAgain) {
  static FailingHeap heap;
  c10::SetCPUAllocator(&heap, /*priority=*/200);
  const std::int64_t stride = tests_are_long() ? 1 : 11;
  for (const Placed& placed : {Placed(ShardingStrategy::kFullShard, /*shared=*/false, /*on_disk=*/true),
                               Placed(ShardingStrategy::kFullShard, /*shared=*/true)}) {
    Values wanted;
    EXPECT_EQ(failure_of(placed, 0, &wanted), "");
    std::int64_t n = 1;
    for (std::string text; !(text = failure_of(placed, n)).empty(); n += stride) {
      EXPECT_THAT(text, ::testing::ContainsRegex("memory|bad_alloc|allocate"))
          << name_of(placed) << ", allocation " << n;
      ASSERT_LT(n, 20000);
    }
    EXPECT_GT(n, 2 * stride) << name_of(placed);
    Values after;
    EXPECT_EQ(failure_of(placed, 0, &after), "");
    EXPECT_TRUE(all_same_bits(after, wanted)) << name_of(placed);
  }
}

}  // namespace
}  // namespace tessera::testing
