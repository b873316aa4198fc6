// Tests that a steady step allocates no more from the heap than the module itself does. Every operator new of the
// process is counted for the thread that called it. Each thread is a rank. (Tensors have another heap.)

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "tests/support/session.h"

namespace {
thread_local std::int64_t allocations = 0;

void* allocate(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace tessera::testing {
namespace {

constexpr std::size_t kWarmUp = 4, kSteps = 3;

template <class Body>
std::int64_t allocations_in(const Body& body) {
  const std::int64_t before = allocations;
  body();
  return allocations - before;
}

void update_after_backward(Strategy&) {}
void watch_for_spikes(Strategy& strategy) {
  strategy.on_spike = {.action = SpikeAction::kSkip, .factor = 1000, .window = 2};
}
void measure_noise(Strategy& strategy) { strategy.noise_scale.every = 1; }
void update_whole_tensors(Strategy& strategy) { strategy.optimizer.type = OptimizerType::kAdafactor; }
constexpr void (*kUpdates[])(Strategy&) = {update_after_backward, update_in_backward, watch_for_spikes, measure_noise};

/// Counts the allocations of a forward and a backward without an Engine, as in a program with torch::optim.
std::int64_t plain_allocations(const Mesh& mesh, const Batch& batch) {
  Tiny model = make_tiny({}, /*deferred=*/false);
  const at::Tensor tokens = rows_of(batch.tokens, mesh), targets = rows_of(batch.targets, mesh);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < kWarmUp; ++i) {
    count = allocations_in([&] { model->forward(tokens, targets).backward(); });
    model->zero_grad();
  }
  return count;
}

void expect_steady_step(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy);
  for (std::size_t i = 0; i < kWarmUp; ++i) session.train(i);
  for (std::size_t i = 0; i < kSteps; ++i) {
    session.engine.backward(session.loss(i));
    EXPECT_EQ(allocations_in([&] { session.engine.step(); }), 0) << "step " << i;
  }
}

TEST(Allocations, SteadyStepAllocatesNothing) {
  for (const auto update : kUpdates) on_each_placement(2, expect_steady_step, update);
  on_placements(kInMemory, 2, expect_steady_step, update_whole_tensors);
}

// The counted step is complete: it begins at the end of the previous step, so it includes the wait for data. One of the
// two sessions times calls (Engine::time_calls), which must not allocate more. The smallest count of a few steps is
// compared, as a step that must wait for another rank may allocate a little more.
TEST(Allocations, TimedCallsAllocateNothing) {
  const auto body = [](const Mesh& mesh, const Strategy& strategy) {
    const auto of_a_step = [&](bool timed) {
      Session session(mesh, strategy);
      if (timed) session.engine.time_calls();
      for (std::size_t i = 0; i < kWarmUp; ++i) session.train(i);
      std::int64_t least = std::numeric_limits<std::int64_t>::max();
      for (std::size_t i = 0; i < kSteps; ++i) least = std::min(least, allocations_in([&] { session.train(0); }));
      return least;
    };
    EXPECT_EQ(of_a_step(true), of_a_step(false));
  };
  on_each_placement(2, body);
}

void expect_no_more_than_plain_module(const Mesh& mesh, const Strategy& strategy) {
  // Each backward makes a scaled seed and reads the loss. These allocations do not depend on the size of the model.
  // Autograd also makes a list for each parameter with a hook before accumulation (engine/parameters/gradient_hooks.h).
  constexpr std::int64_t kOfOneBackward = 10;
  Session session(mesh, strategy);
  const Batch& batch = session.batches[0];
  const std::int64_t plain = plain_allocations(mesh, batch);
  for (std::size_t i = 0; i < kWarmUp; ++i) session.train(i);
  const at::Tensor tokens = rows_of(batch.tokens, mesh), targets = rows_of(batch.targets, mesh);
  for (std::size_t i = 0; i < kSteps; ++i) {
    const std::int64_t mine = allocations_in([&] { session.engine.backward(session.model->forward(tokens, targets)); });
    const auto hooked = static_cast<std::int64_t>(session.model->parameters().size());
    EXPECT_LE(mine, plain + kOfOneBackward + hooked) << "step " << i;
    session.engine.step();
  }
}

// The counts include gathers, releases, prefetches and reductions.
TEST(Allocations, ForwardAndBackwardAllocateNoMoreThanThePlainModule) {
  for (const auto update : kUpdates) on_each_placement(2, expect_no_more_than_plain_module, update);
}

// Allocations of pulls are counted in forward, and allocations of pushes in the step. Both are counted once with a
// bound on staleness, which makes ranks wait, and once without a bound.
TEST(Allocations, AsynchronousPullsAndPushesAllocateNothing) {
  for (const bool is_bound : {false, true}) {
    Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
    strategy.sync.type = SyncType::kAsynchronous;
    if (is_bound) strategy.sync.asynchronous.max_staleness = 0;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      expect_steady_step(mesh, strategy);
      expect_no_more_than_plain_module(mesh, strategy);
    });
  }
}

TEST(Allocations, StepsWithBackupsAllocateNothing) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.sync.type = SyncType::kBackups;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    expect_steady_step(mesh, strategy);
    expect_no_more_than_plain_module(mesh, strategy);
  });
}

}  // namespace
}  // namespace tessera::testing
