// Tests the norm of gradients. It has the same bits for every division into parts and pieces and for every instruction
// set, and it is close to the exact sum.

#include "optim/grad_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <stdexcept>

namespace tessera {
namespace {

std::vector<float> random_values(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& x : values) x = std::ldexp(normal(random), static_cast<int>(random() % 40) - 20);
  return values;
}

/// Tensors in one flat buffer: large tensors begin at multiples of 256, and small tensors begin anywhere inside a
/// block.
struct Buffer {
  std::vector<std::uint64_t> numels, begins;
  std::vector<float> values;

  explicit Buffer(std::vector<std::uint64_t> numels_given, std::uint32_t seed = 1) : numels(std::move(numels_given)) {
    std::uint64_t next = 0;
    for (const std::uint64_t numel : numels) {
      const bool fits = numel < kNormBlock && next % kNormBlock + numel <= kNormBlock;
      if (!fits) next = norm_blocks_of(next) * kNormBlock;
      begins.push_back(next);
      next += numel;
    }
    values = random_values(norm_blocks_of(next) * kNormBlock, seed);
  }
  std::uint64_t blocks() const { return norm_blocks_of(values.size()); }
  std::span<const float> tensor(std::size_t t) const { return std::span(values).subspan(begins[t], numels[t]); }

  /// Returns the runs of tensors in the blocks [first, last).
  std::vector<NormRun> runs(std::uint64_t first, std::uint64_t last) const {
    const std::uint64_t part = first * kNormBlock, part_end = last * kNormBlock;
    std::vector<NormRun> runs;
    for (std::uint32_t t = 0; t < numels.size(); ++t) {
      const std::uint64_t begin = std::max(begins[t], part), end = std::min(begins[t] + numels[t], part_end);
      if (begin >= end) continue;
      const bool is_last = end == begins[t] + numels[t];
      runs.push_back({begin - part, end - begin, (begin - begins[t]) / kNormBlock, t, is_last});
    }
    return runs;
  }
  std::span<const float> part(std::uint64_t first, std::uint64_t last) const {
    return std::span(values).subspan(first * kNormBlock, (last - first) * kNormBlock);
  }
};

struct Norm {
  double total = 0.0;
  std::vector<double> squares;
  friend bool operator==(const Norm&, const Norm&) = default;
};

/// Returns the norm of a buffer that is cut at the block numbers `cuts`. These run from 0 to the buffer's end. Each
/// part is added in pieces of random length.
Norm norm_of(const Buffer& buffer, const std::vector<std::uint64_t>& cuts, std::mt19937& random,
             InstructionSet set = best_instruction_set()) {
  std::vector<std::vector<NormRun>> runs;
  std::vector<NormSums> parts;
  std::vector<const double*> sums;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    runs.push_back(buffer.runs(cuts[k], cuts[k + 1]));
    NormSums& part = parts.emplace_back(runs.back(), set);
    for (std::uint64_t begin = cuts[k]; begin < cuts[k + 1];) {
      const std::uint64_t end = std::min<std::uint64_t>(cuts[k + 1], begin + random() % 5);  // a piece may be empty
      part.add(buffer.part(begin, end));
      begin = end;
    }
    EXPECT_TRUE(part.finite());
  }
  for (const NormSums& part : parts) sums.push_back(part.sums().data());
  const NormTotals totals(buffer.numels, runs);
  Norm norm;
  norm.squares.resize(totals.tensors());
  norm.total = totals.add_up(sums, norm.squares);
  return norm;
}

Norm norm_of(const Buffer& buffer, InstructionSet set = best_instruction_set()) {
  std::mt19937 random(9);
  return norm_of(buffer, {0, buffer.blocks()}, random, set);
}

std::vector<std::uint64_t> random_numels(std::mt19937& random) {
  std::vector<std::uint64_t> numels;
  const std::size_t count = 1 + random() % 12;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t most[] = {4, 255, 300, 256 * 9, 256 * 70};
    numels.push_back(random() % 8 == 0 ? 256 * (1 + random() % 16) : random() % most[random() % 5]);
  }
  return numels;
}

TEST(GradNorm, EveryCutIntoPartsAndPiecesGivesTheSameBits) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    const Buffer buffer(random_numels(random), random());
    const Norm wanted = norm_of(buffer);
    for (int parts = 1; parts <= 8; ++parts) {
      std::vector<std::uint64_t> cuts = {0, buffer.blocks()};
      for (int i = 1; i < parts; ++i) cuts.push_back(random() % (buffer.blocks() + 1));  // a part may be empty
      std::sort(cuts.begin(), cuts.end());
      ASSERT_EQ(norm_of(buffer, cuts, random), wanted) << "trial " << trial << ", " << parts << " parts";
    }
  }
}

TEST(GradNorm, TensorsNormDoesNotDependOnItsPlace) {
  const Buffer together({20, 700, 3, 256 * 5, 100, 1, 256 * 33 + 9, 0, 255}, 3);
  const Norm norm = norm_of(together);
  double total = 0.0;
  for (std::size_t t = 0; t < together.numels.size(); ++t) {
    Buffer alone({together.numels[t]});
    std::copy(together.tensor(t).begin(), together.tensor(t).end(), alone.values.begin());
    EXPECT_EQ(norm_of(alone).total, norm.squares[t]) << t;
    total += norm.squares[t];
  }
  EXPECT_EQ(norm.total, total) << "in order of the numbers";
}

// The memory between tensors does not count, whatever its content is.
TEST(GradNorm, MemoryBetweenTensorsDoesNotCount) {
  Buffer buffer({20, 700, 3, 300}, 4);
  const Norm wanted = norm_of(buffer);
  std::vector<float> spoilt(buffer.values.size(), NAN);
  for (std::size_t t = 0; t < buffer.numels.size(); ++t) {
    std::copy(buffer.tensor(t).begin(), buffer.tensor(t).end(), spoilt.begin() + static_cast<long>(buffer.begins[t]));
  }
  buffer.values = spoilt;
  EXPECT_EQ(norm_of(buffer), wanted);
}

// Computes the sum directly by its definition, which is a recursion over the dyadic tree.
double recursive_sum(const std::vector<double>& blocks, std::uint64_t begin, std::uint64_t width) {
  if (width == 1) return blocks[begin];
  const double left = recursive_sum(blocks, begin, width / 2);
  const std::uint64_t right = begin + width / 2;
  return right < blocks.size() ? left + recursive_sum(blocks, right, width / 2) : left;
}

TEST(GradNorm, SumIsADyadicTreeOverTheTensorsBlocks) {
  for (std::uint64_t blocks = 1; blocks <= 70; ++blocks) {
    const Buffer buffer({blocks * kNormBlock - 3}, static_cast<std::uint32_t>(blocks));
    std::vector<double> sums;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      Buffer block({std::min(kNormBlock, buffer.numels[0] - i * kNormBlock)});
      std::copy_n(buffer.values.begin() + static_cast<long>(i * kNormBlock), block.numels[0], block.values.begin());
      sums.push_back(norm_of(block).total);
    }
    EXPECT_EQ(norm_of(buffer).total, recursive_sum(sums, 0, std::bit_ceil(blocks))) << blocks;
  }
}

TEST(GradNorm, IsCloseToTheExactSum) {
  const Buffer buffer({256 * 999 + 77, 5, 100, 256 * 10, 31}, 5);
  long double exact = 0.0L;
  for (std::size_t t = 0; t < buffer.numels.size(); ++t) {
    for (const float x : buffer.tensor(t)) exact += static_cast<long double>(x) * x;
  }
  EXPECT_NEAR(norm_of(buffer).total / static_cast<double>(exact), 1.0, 1e-14);
}

TEST(GradNorm, EveryInstructionSetGivesTheSameBits) {
  const Buffer buffer({256 * 37 + 101, 17, 40, 255, 999}, 6);
  const Norm wanted = norm_of(buffer, InstructionSet::kPortable);
  for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (!supports(set)) continue;
    EXPECT_EQ(norm_of(buffer, set), wanted) << name_of(set);
  }
}

TEST(GradNorm, OneNonFiniteElementMakesTheNormNonFinite) {
  const Buffer finite({256 * 9 + 2, 40, 100}, 7);
  for (float bad : {HUGE_VALF, -HUGE_VALF, NAN}) {
    for (std::size_t t = 0; t < 3; ++t) {
      for (const std::uint64_t at : {std::uint64_t{0}, finite.numels[t] / 2, finite.numels[t] - 1}) {
        Buffer buffer = finite;
        buffer.values[buffer.begins[t] + at] = bad;
        NormSums sums(buffer.runs(0, buffer.blocks()));
        sums.add(buffer.values);
        EXPECT_FALSE(sums.finite()) << bad << " in tensor " << t;
        sums.reset();
        sums.add(finite.values);
        EXPECT_TRUE(sums.finite());
      }
    }
  }
  Buffer largest({256 * 4});
  std::fill(largest.values.begin(), largest.values.end(), 3.4e38f);  // these numbers are large, but finite
  EXPECT_TRUE(std::isfinite(norm_of(largest).total));
}

TEST(GradNorm, PartSendsOneSumPerWholeTensorAndFewPerCutOne) {
  const auto count = [](std::uint64_t first_block, std::uint64_t numel, bool is_last) {
    return NormSums({{.begin = 0, .numel = numel, .first_block = first_block, .tensor = 0, .is_last = is_last}})
        .count();
  };
  for (std::uint64_t blocks = 1; blocks < 5000; blocks += 1 + blocks / 7) {
    const std::uint64_t numel = blocks * kNormBlock;
    EXPECT_EQ(count(0, numel, true), 1u) << blocks;
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{1}, blocks / 3, blocks}) {
      const auto most = static_cast<unsigned>(std::max<std::size_t>(1, std::bit_width(blocks - 1)));
      EXPECT_LE(count(first, numel, true), 1 + most) << blocks;
      EXPECT_LE(count(first, numel, false), 2 * most) << blocks;
    }
  }
}

TEST(GradNorm, SumsReuseTheirMemory) {
  const Buffer buffer({256 * 301 + 5, 30, 40, 256 * 64}, 8);
  NormSums sums(buffer.runs(0, buffer.blocks()));
  for (int step = 0; step < 2; ++step) {
    sums.reset();
    EXPECT_THROW(sums.sums(), std::logic_error) << "before all elements have come";
    sums.add(buffer.part(0, 7));
    sums.add(buffer.part(7, buffer.blocks()));
    EXPECT_EQ(sums.sums().size(), sums.count());
  }
  const double* const memory = sums.sums().data();
  sums.reset();
  sums.add(buffer.values);
  EXPECT_EQ(sums.sums().data(), memory);
}

TEST(GradNorm, RefusesPiecesThatCutABlock) {
  const Buffer buffer({256 * 3, 100, 100}, 9);
  const auto first = [&](std::size_t numel) { return std::span(buffer.values).first(numel); };
  for (const std::size_t numel : {1u, 255u, 257u, 256u * 3 + 99u, 256u * 3 + 150u}) {
    NormSums sums(buffer.runs(0, 4));
    EXPECT_THROW(sums.add(first(numel)), std::invalid_argument) << numel;
  }
  NormSums sums(buffer.runs(0, 4));
  sums.add(first(256 * 3 + 100));  // this cut lies between two tensors
}

TEST(GradNorm, OmittedTensorsCountAsZeros) {
  Buffer buffer({700, 40, 256 * 5, 100}, 9);
  std::vector<float> without = buffer.values;
  const std::uint64_t left = buffer.begins[1], next = buffer.begins[3];
  std::fill(without.begin() + static_cast<long>(left), without.begin() + static_cast<long>(next), 0.0f);
  NormSums wanted(buffer.runs(0, buffer.blocks())), got(buffer.runs(0, buffer.blocks()));
  wanted.add(without);
  const auto values = std::span<const float>(buffer.values);
  got.add(values.first(buffer.begins[0] + 700));
  got.skip_to(next);
  got.add(values.subspan(next));
  EXPECT_TRUE(std::ranges::equal(got.sums(), wanted.sums()));
  got.reset();
  got.add(values.first(256));
  got.skip_to(256);  // this skip leaves nothing out
  EXPECT_THROW(got.skip_to(512), std::invalid_argument) << "inside a tensor";
  EXPECT_THROW(got.skip_to(0), std::invalid_argument) << "backward";
  got.reset();
  EXPECT_THROW(got.skip_to(next + 1), std::invalid_argument) << "inside a later tensor";
}

TEST(GradNorm, PartsThatDoNotMakeUpTheTensorsAreRefused) {
  const std::vector<std::uint64_t> numels = {256 * 11, 40};
  const NormRun whole{.begin = 0, .numel = 256 * 11, .first_block = 0, .tensor = 0};
  const NormRun small{.begin = 0, .numel = 40, .first_block = 0, .tensor = 1};
  const NormRun head{.begin = 0, .numel = 256 * 5, .first_block = 0, .tensor = 0, .is_last = false};
  const NormRun tail{.begin = 0, .numel = 256 * 6, .first_block = 5, .tensor = 0};
  const NormRun unended{.begin = 0, .numel = 256 * 11, .first_block = 0, .tensor = 0, .is_last = false};
  const NormRun ended{.begin = 0, .numel = 256 * 5, .first_block = 0, .tensor = 0};
  const NormRun stranger{.begin = 0, .numel = 40, .first_block = 0, .tensor = 2};
  using Parts = std::vector<std::vector<NormRun>>;
  EXPECT_NO_THROW(NormTotals(numels, Parts{{whole, small}}));
  EXPECT_NO_THROW(NormTotals(numels, Parts{{head}, {tail, small}}));
  for (const Parts& wrong : {Parts{{whole}}, Parts{{head, small}}, Parts{{tail, small}}, Parts{{whole, small}, {tail}},
                             Parts{{tail}, {head, small}}, Parts{{whole, small, stranger}}, Parts{{unended, small}},
                             Parts{{ended}, {tail, small}}}) {
    EXPECT_THROW(NormTotals(numels, wrong), std::invalid_argument);
  }
  EXPECT_THROW(NormSums({{.begin = 0, .numel = 0, .first_block = 0, .tensor = 0}}), std::invalid_argument);
}

TEST(GradNorm, NormOfNothingIsZero) {
  const NormTotals totals({}, std::vector<std::vector<NormRun>>{{}});
  EXPECT_EQ(totals.add_up(std::vector<const double*>{nullptr}, {}), 0.0);
  EXPECT_EQ(norm_of(Buffer({0, 0})).total, 0.0);
}

}  // namespace
}  // namespace tessera
