// Tests where tensors lie in a flat buffer, and where shards are cut, for random layouts.

#include "sharding/layout/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>

namespace tessera {
namespace {

using Numels = std::vector<std::int64_t>;

Numels random_numels(std::mt19937& random) {
  Numels numels;
  const std::int64_t most[] = {5, 32, 64, 128, 255, 300, 60000};
  const std::int64_t limit = most[random() % std::size(most)];
  const std::size_t count = 1 + random() % 14;
  for (std::size_t i = 0; i < count; ++i) {
    numels.push_back(random() % 9 == 0 ? limit : static_cast<std::int64_t>(random()) % (limit + 1));
  }
  return numels;
}

constexpr SmallTensors kEither[] = {SmallTensors::kShareBlocks, SmallTensors::kOwnBlocks};

/// Calls `check(numels, parts, small, layout)` for many random layouts.
template <class Check>
void on_random_layouts(const Check& check) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const Numels numels = random_numels(random);
    for (const int parts : {1, 2, 3, 4, 7, 8}) {
      for (const SmallTensors small : kEither) check(numels, parts, small, Layout::pack(numels, parts, small));
    }
  }
}

TEST(Layout, TensorsLieInOrderAndAligned) {
  on_random_layouts([](const Numels& numels, int parts, SmallTensors small, const Layout& layout) {
    ASSERT_EQ(layout.size(), numels.size());
    ASSERT_EQ(layout.parts(), parts);
    std::int64_t next = 0;
    for (std::size_t i = 0; i < numels.size(); ++i) {
      const Extent extent = layout.extent(i);
      ASSERT_EQ(extent.numel, numels[i]);
      ASSERT_GE(extent.offset, next);
      const bool begins_block = numels[i] >= Layout::kBlock || small == SmallTensors::kOwnBlocks;
      ASSERT_EQ(extent.offset % (begins_block ? Layout::kBlock : Layout::kAlign), 0);
      next = extent.end();
    }
    ASSERT_LE(next, layout.numel());
  });
}

TEST(Layout, SmallTensorsDoNotStraddleBlocks) {
  on_random_layouts([](const Numels& numels, int, SmallTensors, const Layout& layout) {
    for (std::size_t i = 0; i < numels.size(); ++i) {
      if (numels[i] == 0 || numels[i] >= Layout::kBlock) continue;
      const Extent extent = layout.extent(i);
      ASSERT_EQ(extent.offset / Layout::kBlock, (extent.end() - 1) / Layout::kBlock) << numels[i];
    }
  });
}

TEST(Layout, TensorsWithOwnBlocksShareNone) {
  on_random_layouts([](const Numels&, int, SmallTensors small, const Layout& layout) {
    if (small == SmallTensors::kShareBlocks) return;
    std::int64_t free = 0;  // the first block that no tensor is in
    for (std::size_t i = 0; i < layout.size(); ++i) {
      if (layout.extent(i).numel == 0) continue;
      ASSERT_GE(layout.extent(i).offset / Layout::kBlock, free);
      free = (layout.extent(i).end() - 1) / Layout::kBlock + 1;
    }
    ASSERT_EQ(layout.cut(), Layout::kBlock);
  });
}

TEST(Layout, ShardsAreEqualAndCutAtBlockBoundaries) {
  on_random_layouts([](const Numels&, int parts, SmallTensors, const Layout& layout) {
    ASSERT_EQ(layout.numel(), parts * layout.shard_numel());
    ASSERT_EQ(layout.shard_numel() % layout.cut(), 0);
    ASSERT_TRUE(std::has_single_bit(static_cast<std::uint64_t>(layout.cut())));
    ASSERT_GE(layout.cut(), Layout::kLeastCut);
    ASSERT_LE(layout.cut(), Layout::kBlock);
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const Extent extent = layout.extent(i);
      for (int part = 1; part < parts; ++part) {
        const std::int64_t cut = layout.shard(part).offset;
        if (cut <= extent.offset || cut >= extent.end()) continue;
        ASSERT_EQ((cut - extent.offset) % Layout::kBlock, 0) << "tensor " << i << " of " << extent.numel;
      }
    }
  });
}

TEST(Layout, PaddingStaysBelowItsBound) {
  on_random_layouts([](const Numels& numels, int parts, SmallTensors small, const Layout& layout) {
    std::int64_t most = parts * layout.cut();
    for (const std::int64_t numel : numels) {
      const bool begins_block = numel >= Layout::kBlock || small == SmallTensors::kOwnBlocks;
      most += begins_block ? Layout::kBlock : std::max(Layout::kAlign, numel);
    }
    ASSERT_LT(layout.padding(), most);
  });
}

TEST(Layout, OffsetsDoNotDependOnTheNumberOfRanks) {
  on_random_layouts([](const Numels& numels, int, SmallTensors small, const Layout& layout) {
    const Layout one = Layout::pack(numels, 1, small);
    ASSERT_EQ(one.cut(), layout.cut());
    for (std::size_t i = 0; i < numels.size(); ++i) ASSERT_EQ(one.extent(i), layout.extent(i));
  });
}

TEST(Layout, ShardsOfSmallTensorsAreNotPaddedToWholeBlocks) {
  // Linear(4, 4): both its tensors are in one block of 64 elements.
  EXPECT_EQ(Layout::pack(Numels{16, 4}, 1).numel(), 64);
  EXPECT_EQ(Layout::pack(Numels{16, 4}, 8).numel(), 8 * 64);
  EXPECT_EQ(Layout::pack(Numels{3}, 8).numel(), 8 * 64);
  EXPECT_EQ(Layout::pack(Numels{100, 100, 28}, 2).shard_numel(), 256);
  EXPECT_EQ(Layout::pack(Numels{100, 100}, 2).shard_numel(), 128);
  EXPECT_EQ(Layout::pack(Numels{256, 4}, 2).shard_numel(), 256);
  EXPECT_EQ(Layout::pack(Numels{16, 4}, 2, SmallTensors::kOwnBlocks).shard_numel(), 256);
}

TEST(Layout, SmallTensorsFillTheLastBlockOfALargeOne) {
  const Layout layout = Layout::pack(Numels{300, 100, 50, 60}, 1);
  EXPECT_EQ(layout.extent(1).offset, 320);
  EXPECT_EQ(layout.extent(2).offset, 448);
  EXPECT_EQ(layout.extent(3).offset, 512);
}

TEST(Layout, GapsAndTensorsCoverTheBufferOnce) {
  on_random_layouts([](const Numels&, int, SmallTensors, const Layout& layout) {
    std::vector<int> hits(static_cast<std::size_t>(layout.numel()));
    const auto mark = [&](Extent e) {
      for (std::int64_t i = e.offset; i < e.end(); ++i) ++hits[static_cast<std::size_t>(i)];
    };
    for (std::size_t i = 0; i < layout.size(); ++i) mark(layout.extent(i));
    for (Extent gap : layout.gaps()) mark(gap);
    ASSERT_TRUE(std::all_of(hits.begin(), hits.end(), [](int n) { return n == 1; }));
  });
}

}  // namespace
}  // namespace tessera
