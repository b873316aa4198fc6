#include "sharding/layout/layout.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

std::vector<LayoutItem> random_items(std::mt19937& random, bool with_blocks) {
  const int count = std::uniform_int_distribution<int>(1, 12)(random);
  std::vector<LayoutItem> items;
  for (int i = 0; i < count; ++i) {
    const std::int64_t rows = std::uniform_int_distribution<std::int64_t>(1, 300)(random);
    const std::int64_t width = std::uniform_int_distribution<std::int64_t>(1, 200)(random);
    std::int64_t block = 1;
    if (with_blocks) {
      const int kind = std::uniform_int_distribution<int>(0, 3)(random);
      block = kind == 0 ? 1 : kind == 1 ? width : kind == 2 ? std::min<std::int64_t>(32, width) : rows * width;
    }
    items.push_back({rows * width, block});
  }
  return items;
}

void expect_invariants(const Layout& layout, const std::vector<LayoutItem>& items, int parts,
                       std::int64_t align = Layout::kAlign) {
  ASSERT_EQ(layout.size(), items.size());
  EXPECT_EQ(layout.parts(), parts);
  EXPECT_EQ(layout.numel(), parts * layout.shard_numel());
  EXPECT_EQ(layout.shard_numel() % Layout::kQuantum, 0);
  std::int64_t next = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Extent extent = layout.extent(i);
    EXPECT_GE(extent.offset, next);
    EXPECT_EQ(extent.offset % align, 0);
    EXPECT_EQ(extent.numel, items[i].numel);
    for (int part = 1; part < parts; ++part) {
      const std::int64_t cut = layout.shard(part).offset;
      if (cut > extent.offset && cut < extent.end()) {
        EXPECT_EQ((cut - extent.offset) % items[i].block, 0) << "tensor " << i << " is cut inside a block";
      }
    }
    next = extent.end();
  }
  EXPECT_LE(next, layout.numel());
}

TEST(Layout, KeepsItsInvariantsForRandomTensors) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const auto items = random_items(random, trial % 2 == 1);
    for (int parts : {1, 2, 3, 4, 8}) {
      expect_invariants(Layout::pack(items, parts), items, parts);
      expect_invariants(Layout::pack(items, parts, Layout::kQuantum), items, parts, Layout::kQuantum);
    }
  }
}

TEST(Layout, OffsetsDoNotDependOnTheNumberOfRanks) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 50; ++trial) {
    const auto items = random_items(random, false);
    const Layout one = Layout::pack(items, 1);
    for (int parts : {2, 3, 8}) {
      const Layout many = Layout::pack(items, parts);
      for (std::size_t i = 0; i < items.size(); ++i) EXPECT_EQ(one.extent(i), many.extent(i));
    }
  }
}

TEST(Layout, CoprimeRowsDoNotBlowTheShardUp) {
  // A common multiple of 1009, 1013 and 1019 is 1.04e9 elements; the tensors hold 3e5.
  const std::vector<LayoutItem> items = {{1009 * 100, 1009}, {1013 * 100, 1013}, {1019 * 100, 1019}};
  for (int parts : {2, 3}) {
    const Layout layout = Layout::pack(items, parts);
    expect_invariants(layout, items, parts);
    EXPECT_LT(layout.padding(), layout.numel() / 5);
  }
}

TEST(Layout, FewerElementsThanRanks) {
  const std::vector<LayoutItem> items = {{3, 1}};
  const Layout layout = Layout::pack(items, 8);
  EXPECT_EQ(layout.shard_numel(), Layout::kQuantum);
  EXPECT_EQ(layout.padding(), 8 * Layout::kQuantum - 3);
}

TEST(Layout, GapsAndTensorsCoverTheBufferOnce) {
  std::mt19937 random(13);
  for (int trial = 0; trial < 50; ++trial) {
    const Layout layout = Layout::pack(random_items(random, true), 4);
    std::vector<int> hits(layout.numel());
    auto mark = [&](Extent e) {
      for (std::int64_t i = e.offset; i < e.end(); ++i) ++hits[i];
    };
    for (std::size_t i = 0; i < layout.size(); ++i) mark(layout.extent(i));
    for (Extent gap : layout.gaps()) mark(gap);
    EXPECT_TRUE(std::all_of(hits.begin(), hits.end(), [](int n) { return n == 1; }));
  }
}

}  // namespace
}  // namespace tessera
