#include "optim/grad_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kBlock = NormTree::kBlockNumel;

std::vector<float> random_values(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& x : values) x = std::ldexp(normal(random), static_cast<int>(random() % 40) - 20);
  return values;
}

// Cuts of [0, blocks) into `shards` runs, some of them empty.
std::vector<std::uint64_t> random_cuts(std::uint64_t blocks, int shards, std::mt19937& random) {
  std::vector<std::uint64_t> cuts = {0, blocks};
  for (int i = 1; i < shards; ++i) cuts.push_back(random() % (blocks + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

std::span<const float> shard_of(const std::vector<float>& values, std::uint64_t first, std::uint64_t last) {
  const std::size_t begin = std::min<std::size_t>(first * kBlock, values.size());
  return std::span(values).subspan(begin, std::min<std::size_t>(last * kBlock, values.size()) - begin);
}

double total_of(const NormTree& tree, std::span<const NormNode> nodes) {
  const absl::StatusOr<double> total = tree.combine(nodes);
  EXPECT_TRUE(total.ok()) << message_of(total.status());
  return total.ok() ? *total : -1.0;
}

double whole_sum(const NormTree& tree, const std::vector<float>& values) {
  std::vector<NormNode> nodes;
  bool finite = true;
  tree.partial(values, 0, nodes, finite);
  return total_of(tree, nodes);
}

TEST(NormTree, EveryCutIntoShardsGivesTheSameBits) {
  std::mt19937 random(1);
  for (std::size_t numel : {1ul, 255ul, 256ul, 257ul, 4096ul, 256ul * 13 + 7, 256ul * 100, 256ul * 257 + 1}) {
    const std::vector<float> values = random_values(numel, 2);
    const NormTree tree(NormTree::blocks_of(numel));
    const double wanted = whole_sum(tree, values);
    for (int shards = 1; shards <= 8; ++shards) {
      for (int trial = 0; trial < 30; ++trial) {
        const auto cuts = random_cuts(tree.total_blocks(), shards, random);
        std::vector<NormNode> all;
        bool finite = true;
        for (int i = 0; i < shards; ++i) {
          const std::size_t before = all.size();
          tree.partial(shard_of(values, cuts[i], cuts[i + 1]), cuts[i], all, finite);
          ASSERT_LE(all.size() - before, tree.max_nodes());
        }
        all.resize(all.size() + 3);  // absent nodes, as ranks with fewer send them
        std::shuffle(all.begin(), all.end(), random);
        const double got = total_of(tree, all);
        ASSERT_EQ(std::memcmp(&wanted, &got, sizeof got), 0) << numel << " elements, " << shards << " shards";
        ASSERT_TRUE(finite);
      }
    }
  }
}

// The definition, written down a second time: recursion over the dyadic tree.
double recursive_sum(const std::vector<double>& blocks, std::uint64_t begin, std::uint64_t width) {
  if (width == 1) return blocks[begin];
  const double left = recursive_sum(blocks, begin, width / 2);
  const std::uint64_t right = begin + width / 2;
  return right < blocks.size() ? left + recursive_sum(blocks, right, width / 2) : left;
}

TEST(NormTree, IsTheDyadicTreeOverBlocks) {
  for (std::uint64_t blocks = 1; blocks <= 70; ++blocks) {
    const std::vector<float> values = random_values(blocks * kBlock, static_cast<std::uint32_t>(blocks));
    const NormTree one_block(1);
    std::vector<double> sums;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      const auto block = shard_of(values, i, i + 1);
      sums.push_back(whole_sum(one_block, std::vector<float>(block.begin(), block.end())));
    }
    EXPECT_EQ(whole_sum(NormTree(blocks), values), recursive_sum(sums, 0, std::bit_ceil(blocks))) << blocks;
  }
}

TEST(NormTree, IsCloseToTheExactSum) {
  const std::vector<float> values = random_values(256 * 999 + 77, 5);
  long double exact = 0.0L;
  for (float x : values) exact += static_cast<long double>(x) * x;
  const double got = whole_sum(NormTree(1000), values);
  EXPECT_NEAR(got / static_cast<double>(exact), 1.0, 1e-14);
}

TEST(NormTree, EveryInstructionSetGivesTheSameBits) {
  const std::vector<float> values = random_values(256 * 37 + 101, 6);
  const double wanted = whole_sum(NormTree(38, InstructionSet::kPortable), values);
  for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (!supports(set)) continue;
    EXPECT_EQ(whole_sum(NormTree(38, set), values), wanted) << name_of(set);
  }
}

TEST(NormTree, ReportsWhatIsNotFinite) {
  for (float bad : {HUGE_VALF, -HUGE_VALF, NAN}) {
    for (std::size_t at : {0ul, 255ul, 256ul * 5 + 3, 256ul * 9 + 1}) {
      std::vector<float> values = random_values(256 * 9 + 2, 7);
      const NormTree tree(10);
      std::vector<NormNode> nodes;
      bool finite = true;
      tree.partial(values, 0, nodes, finite);
      EXPECT_TRUE(finite);
      values[at] = bad;
      nodes.clear();
      tree.partial(values, 0, nodes, finite);
      EXPECT_FALSE(finite) << bad << " at " << at;
      EXPECT_FALSE(std::isfinite(total_of(tree, nodes)));
    }
  }
  const std::vector<float> largest(256 * 4, 3.4e38f);  // finite, however large
  EXPECT_TRUE(std::isfinite(whole_sum(NormTree(4), largest)));
}

TEST(NormTree, RefusesMissingAndDoubledNodes) {
  const std::vector<float> values = random_values(256 * 11, 8);
  const NormTree tree(11);
  std::vector<NormNode> nodes;
  bool finite = true;
  tree.partial(values, 0, nodes, finite);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    std::vector<NormNode> missing = nodes, doubled = nodes, strange = nodes;
    missing.erase(missing.begin() + static_cast<std::ptrdiff_t>(i));
    doubled.push_back(nodes[i]);
    strange[i].level = 64;
    for (const auto& wrong : {missing, doubled, strange}) {
      const auto total = tree.combine(wrong);
      ASSERT_FALSE(total.ok());
      EXPECT_EQ(exit_code_of(total.status()), ExitCode::kInternal);
    }
  }
}

TEST(NormTree, RefusesShardsThatDoNotFit) {
  const std::vector<float> values = random_values(256 * 4, 9);
  const NormTree tree(4);
  std::vector<NormNode> nodes;
  bool finite = true;
  EXPECT_THROW(tree.partial(values, 1, nodes, finite), std::invalid_argument);
  EXPECT_THROW(tree.partial(std::span(values).first(300), 0, nodes, finite), std::invalid_argument);
  EXPECT_THROW(tree.partial(std::span(values).first(256), 4, nodes, finite), std::invalid_argument);
  tree.partial({}, 4, nodes, finite);
  EXPECT_TRUE(nodes.empty());
}

bool same_nodes(std::span<const NormNode> a, std::span<const NormNode> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

TEST(NormTreeBuilder, AnyCutIntoPiecesGivesTheNodesOfTheWholeShard) {
  std::mt19937 random(10);
  constexpr std::uint64_t kBlocks = 301;
  const std::vector<float> values = random_values(kBlock * (kBlocks - 1) + 77, 11);
  const NormTree tree(kBlocks);
  NormTree::Builder builder(tree);
  for (int trial = 0; trial < 200; ++trial) {
    const std::uint64_t first = random() % kBlocks, last = first + random() % (kBlocks - first) + 1;
    std::vector<NormNode> wanted;
    bool finite = true;
    tree.partial(shard_of(values, first, last), first, wanted, finite);

    builder.reset(first);
    const NormNode* memory = builder.nodes().data();
    for (std::uint64_t begin = first; begin < last;) {
      const std::uint64_t end = std::min<std::uint64_t>(last, begin + random() % 40);  // also empty pieces
      builder.add(shard_of(values, begin, end));
      begin = end;
    }
    ASSERT_TRUE(same_nodes(builder.nodes(), wanted)) << "blocks " << first << " to " << last;
    EXPECT_TRUE(builder.finite());
    EXPECT_EQ(builder.nodes().data(), memory) << "it allocated";
  }
}

TEST(NormTreeBuilder, RemembersWhatIsNotFiniteUntilReset) {
  std::vector<float> values = random_values(kBlock * 4, 12);
  values[kBlock + 5] = HUGE_VALF;
  NormTree::Builder builder(NormTree(4));
  builder.reset(0);
  builder.add(std::span(values).first(kBlock));
  EXPECT_TRUE(builder.finite());
  builder.add(std::span(values).subspan(kBlock));
  EXPECT_FALSE(builder.finite());
  builder.reset(2);
  builder.add(std::span(values).subspan(2 * kBlock));
  EXPECT_TRUE(builder.finite());
}

TEST(NormTreeBuilder, RefusesPiecesThatDoNotFit) {
  const std::vector<float> values = random_values(kBlock * 4, 13);
  NormTree::Builder builder(NormTree(4));
  builder.reset(0);
  EXPECT_THROW(builder.add(std::span(values).first(100)), std::invalid_argument);
  builder.reset(3);
  builder.add(std::span(values).first(100));  // the unit's last block may be short, and then nothing follows
  EXPECT_THROW(builder.add(std::span(values).first(1)), std::invalid_argument);
}

TEST(NormTree, CombinesInMemoryThatIsKept) {
  const NormTree tree(100);
  const std::vector<float> values = random_values(kBlock * 100, 14);
  std::vector<NormNode> nodes, scratch;
  bool finite = true;
  for (std::uint64_t i = 0; i < 100; i += 5) tree.partial(shard_of(values, i, i + 5), i, nodes, finite);
  const auto first = tree.combine(nodes, scratch);
  const NormNode* memory = scratch.data();
  const auto second = tree.combine(nodes, scratch);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(*first, total_of(tree, nodes));
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(scratch.data(), memory) << "it allocated";
}

TEST(NormTree, OfNothingIsZero) { EXPECT_EQ(total_of(NormTree(0), {}), 0.0); }

}  // namespace
}  // namespace tessera
