// Tests arenas, which provide the planned memory.

#include "sharding/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool all_are(const std::byte* memory, std::int64_t bytes, std::byte value) {
  return std::all_of(memory, memory + bytes, [&](std::byte b) { return b == value; });
}

TEST(Arena, PiecesAreConsecutiveAndZeroed) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<std::int64_t> sizes;
    std::int64_t total = 0;
    for (int i = 0; i < 10; ++i) total += sizes.emplace_back(64 * (random() % 300));
    Arena arena = Arena::plain("pieces", total);
    EXPECT_EQ(arena.bytes(), total);
    std::int64_t taken = 0;
    for (const std::int64_t bytes : sizes) {
      std::byte* const piece = arena.take(bytes);
      ASSERT_EQ(piece, arena.data() + taken);
      ASSERT_TRUE(all_are(piece, bytes, std::byte{0}));
      std::fill_n(piece, bytes, std::byte{0xff});
      taken += bytes;
      ASSERT_EQ(arena.taken(), taken);
    }
    EXPECT_NO_THROW(arena.expect_full());
  }
}

TEST(Arena, TakingMoreOrLessThanPlannedIsAnError) {
  Arena arena = Arena::plain("gradients", 128);
  arena.take(64);
  EXPECT_THROW(arena.expect_full(), c10::Error);
  EXPECT_THROW(arena.take(65), c10::Error);
  EXPECT_EQ(arena.taken(), 64) << "what is refused is not taken";
  arena.take(64);
  arena.expect_full();
}

TEST(Arena, EmptyArenaIsFull) {
  Arena none;
  none.expect_full();
  Arena empty = Arena::plain("nothing", 0);
  empty.take(0);
  empty.expect_full();
}

TEST(Arena, TooLargeAllocationNamesItsPurpose) {
  try {
    Arena::plain("the moments", std::int64_t{1} << 60);
    FAIL() << "it fits";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kOsResource);
    EXPECT_NE(error.message().find("the moments"), std::string::npos) << error.message();
  }
}

TEST(Arena, SharedMemoryIsDistinctForEachRank) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, 3));
    Arena arena = Arena::shared("shards", 4096, *axes.gather);
    ASSERT_TRUE(all_are(arena.data(), 4096, std::byte{0}));
    const auto mine = static_cast<std::byte>(mesh.rank() + 1);
    std::fill_n(arena.data(), 4096, mine);
    throw_if_error(axes.gather->barrier("written").wait());
    EXPECT_TRUE(all_are(arena.data(), 4096, mine));
  });
}

TEST(Arena, CommonMemoryIsTheSameOnAllRanks) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, 3));
    Arena arena = Arena::common("parameters", 3 * 256, *axes.gather);
    std::fill_n(arena.data() + 256 * mesh.rank(), 256, static_cast<std::byte>(mesh.rank() + 1));
    throw_if_error(axes.gather->barrier("written").wait());
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(all_are(arena.data() + 256 * rank, 256, static_cast<std::byte>(rank + 1))) << rank;
    }
  });
}

// Objects that use an arena's memory may outlive the arena.
TEST(Arena, CopyOutlivesTheArenaAndSharesItsMemory) {
  Arena copy;
  {
    Arena arena = Arena::plain("values", 64);
    std::memset(arena.take(64), 7, 64);
    copy = arena;
  }
  EXPECT_TRUE(all_are(copy.data(), 64, std::byte{7}));
}

}  // namespace
}  // namespace tessera
