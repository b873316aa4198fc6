// Tests the heap from which LibTorch's tensors get their memory.

#include "engine/memory/tensor_heap.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <limits>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

void train_once(bool tensor_heap) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
    strategy.memory.tensor_heap = tensor_heap;
    Session(mesh, strategy).train(0);
  });
}

// An Engine changes the heap of the whole process, so the order of the calls is part of the test.
TEST(TensorHeap, EngineInstallsItUnlessTheStrategyForbids) {
  c10::Allocator* const libtorchs = c10::GetCPUAllocator();
  const at::Tensor before = at::arange(100);
  train_once(false);
  EXPECT_EQ(c10::GetCPUAllocator(), libtorchs);
  train_once(true);
  EXPECT_NE(c10::GetCPUAllocator(), libtorchs);
  EXPECT_EQ(before[99].item<int>(), 99);  // the tensor is freed later by the allocator that made it
}

TEST(TensorHeap, TensorsAre64ByteAligned) {
  install_tensor_heap();
  for (std::int64_t bytes : {1, 16, 63, 64, 1000, 4096, 1 << 20}) {
    const at::Tensor tensor = at::empty({bytes}, at::kByte);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0u) << bytes;
  }
  EXPECT_EQ(at::empty({0}).data_ptr(), nullptr);
}

TEST(TensorHeap, FreedPlaceIsReusedForTheSameSize) {
  install_tensor_heap();
  const auto make = [](std::int64_t bytes) { return at::empty({bytes}, at::kByte); };
  make(20'000'000);  // freed: from now on the heap serves blocks up to this size and maps none of them separately
  for (std::int64_t bytes : {std::int64_t{200'000}, std::int64_t{5'000'000}}) {
    at::Tensor first = make(bytes);
    const at::Tensor behind = make(1000);  // this keeps the freed block away from the end of the heap
    const void* const place = first.data_ptr();
    first.reset();
    const at::Tensor second = make(bytes);
    EXPECT_EQ(second.data_ptr(), place) << bytes;
  }
}

long faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// A malloc that is not set up by install_tensor_heap returns the end of the heap to the system. The tensors of the
// second step then cause as many page faults as those of the first step.
TEST(TensorHeap, FreedMemoryOfAStepIsKeptForTheNext) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "a sanitizer has a malloc of its own";
#endif
  install_tensor_heap();
  const auto step = [] {
    const long before = faults();
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 8; ++i) tensors.push_back(at::ones({20'000'000}, at::kByte));
    return faults() - before;
  };
  const long first = step(), second = step();
  EXPECT_GT(first, 8 * 20'000'000 / (2 << 20) / 2);  // the system may use large pages
  EXPECT_LE(second, first / 10);
}

TEST(TensorHeap, TooLargeAllocationIsAnError) {
  install_tensor_heap();
  EXPECT_THROW(at::empty({std::numeric_limits<std::int64_t>::max() / 2}, at::kByte), c10::Error);
}

}  // namespace
}  // namespace tessera::testing
