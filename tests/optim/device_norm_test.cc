// Compares the norm's sums by CUDA kernels with the sums by the CPU. The bits are the same. The program is built twice
// (device_problem.h).

#include "optim/cuda/device_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/scalar_lane.h"
#include "optim/grad_norm.h"
#include "tests/optim/device_memory.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace device_norm_test {

using DeviceNorm = DeviceKernels;

std::vector<float> random_values(std::size_t numel, std::uint32_t seed) {
  return StepProblem(numel, seed, false).gradient;
}

/// Returns the sums that the device computes for buffers with these runs.
std::vector<double> device_sums(const std::vector<std::vector<float>>& values,
                                const std::vector<std::vector<NormRun>>& runs) {
  std::vector<Shared<float>> memory;
  std::vector<NormBuffer> buffers;
  std::size_t count = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    buffers.push_back({memory.emplace_back(values[i]).data(), runs[i]});
    count += NormSums(runs[i]).count();
  }
  // Marker values show that the memory behind the sums and behind the scratch memory does not change.
  constexpr double kMark = -7.0;
  const std::size_t scratch_count = norm_scratch_count(buffers);
  const Shared<double> sums{std::vector<double>(count + 8, kMark)};
  const Shared<double> scratch{std::vector<double>(scratch_count + 8, kMark)};
  const NormLaunch launch = norm_launch(buffers, sums.data(), scratch.data());
  const Shared<NormTileNode> nodes(launch.nodes);
  const Shared<std::uint32_t> first_node(launch.first_node);
  const Shared<NormSpan> spans(launch.spans);
  check(cuda::norm_sums(
      {nodes.data(), first_node.data(), spans.data(), static_cast<std::uint32_t>(launch.first_node.size() - 1),
       static_cast<std::uint32_t>(launch.spans.size())},
      nullptr));
  std::vector<double> got = sums.values();
  const std::vector<double> rest = scratch.values();
  EXPECT_TRUE(std::all_of(got.begin() + static_cast<long>(count), got.end(), [](double x) { return x == kMark; }));
  EXPECT_TRUE(
      std::all_of(rest.begin() + static_cast<long>(scratch_count), rest.end(), [](double x) { return x == kMark; }));
  got.resize(count);
  return got;
}

std::vector<double> cpu_sums(const std::vector<float>& values, const std::vector<NormRun>& runs) {
  NormSums sums(runs);
  sums.add(values);
  return {sums.sums().begin(), sums.sums().end()};
}

TEST_F(DeviceNorm, SumsGiveTheCpusBitsForEveryRun) {
  struct Case {
    std::uint64_t first, end;  // blocks of the tensor
    bool is_last;
    std::uint64_t short_by = 0;  // elements that the tensor's last block lacks
  };
  // A run has no whole tile of 256 blocks, one tile, or several tiles. Each kind of run occurs with more blocks before
  // and behind it, and without.
  for (const Case& c :
       {Case{0, 1, true}, Case{0, 1, true, 255}, Case{5, 9, true}, Case{5, 9, false}, Case{3, 3 + 500, false},
        Case{3, 3 + 500, true}, Case{0, 256, true, 3}, Case{255, 513, false}, Case{1, 1030, true, 100},
        Case{0, 1024, false}, Case{0, 1300, true, 1}, Case{0, 257, true, 255}}) {
    const std::uint64_t numel = (c.end - c.first) * kNormBlock - c.short_by;
    const std::vector<float> values = random_values(numel, 3);
    const std::vector<NormRun> runs = {
        {.begin = 0, .numel = numel, .first_block = c.first, .tensor = 0, .is_last = c.is_last}};
    EXPECT_TRUE(same_bits(device_sums({values}, {runs}), cpu_sums(values, runs))) << c.first << " to " << c.end;
  }
}

TEST_F(DeviceNorm, TensorsOfSeveralBuffersAreSummedTogether) {
  std::mt19937 random(11);
  std::vector<std::vector<float>> values;
  std::vector<std::vector<NormRun>> runs;
  std::vector<double> wanted;
  std::uint32_t tensor = 0;
  for (int buffer = 0; buffer < 3; ++buffer) {
    std::uint64_t next = 0;
    auto& of_buffer = runs.emplace_back();
    for (int i = 0; i < 150; ++i) {
      // Small tensors lie next to each other. Large tensors begin where a block begins.
      const std::uint64_t numel = 1 + random() % (i % 30 == 7 ? 256 * 300 : i % 5 == 0 ? 3000 : 80);
      if (numel >= kNormBlock || next % kNormBlock + numel > kNormBlock) next = norm_blocks_of(next) * kNormBlock;
      of_buffer.push_back({.begin = next, .numel = numel, .first_block = random() % 3, .tensor = tensor++});
      next += norm_blocks_of(numel) > 1 ? numel : (numel + 31) / 32 * 32;
    }
    values.push_back(random_values(norm_blocks_of(next) * kNormBlock, 12 + static_cast<std::uint32_t>(buffer)));
    const std::vector<double> more = cpu_sums(values.back(), of_buffer);
    wanted.insert(wanted.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(same_bits(device_sums(values, runs), wanted));
}

/// The halves of split masters lie in separate memory, and not at the addresses in the nodes of the tree.
TEST_F(DeviceNorm, SplitMastersAreSummedAsTheirJoinedValues) {
  for (const std::uint64_t numel : {std::uint64_t{100}, 300 * kNormBlock - 5}) {
    std::vector<float> values = random_values(numel, 7);
    std::vector<std::uint16_t> high;
    std::vector<std::int16_t> low;
    for (float& value : values) {
      const auto bits = splittable<std::uint32_t>(value);
      high.push_back(static_cast<std::uint16_t>(split_high(bits)));
      low.push_back(static_cast<std::int16_t>(static_cast<std::uint16_t>(split_low(bits))));
      value = ScalarLane::float_of(bits);
    }
    const std::vector<NormRun> runs = {{.begin = 0, .numel = numel}};
    const Shared<float> nowhere(std::vector<float>{1.0f});
    const std::vector<NormBuffer> buffers = {{nowhere.data(), runs}};
    const Shared<double> sums{std::vector<double>(NormSums(runs).count())};
    const Shared<double> scratch{std::vector<double>(norm_scratch_count(buffers))};
    const NormLaunch launch = norm_launch(buffers, sums.data(), scratch.data());
    const Shared<NormTileNode> nodes(launch.nodes);
    const Shared<std::uint32_t> first_node(launch.first_node);
    const Shared<NormSpan> spans(launch.spans);
    const Shared<std::uint16_t> device_high(high);
    const Shared<std::int16_t> device_low(low);
    NormTables tables;
    tables.nodes = nodes.data();
    tables.first_node = first_node.data();
    tables.spans = spans.data();
    tables.tiles = static_cast<std::uint32_t>(launch.first_node.size() - 1);
    tables.span_count = static_cast<std::uint32_t>(launch.spans.size());
    tables.high = device_high.data();
    tables.low = device_low.data();
    tables.at = nowhere.data();
    check(cuda::norm_sums(tables, nullptr));
    EXPECT_TRUE(same_bits(sums.values(), cpu_sums(values, runs))) << numel;
  }
}

TEST_F(DeviceNorm, TotalsGiveTheCpusBits) {
  // Three tensors lie in three parts, of ranks 2, 0 and 1. The first tensor is cut twice, and ends with a short block.
  const std::vector<std::uint64_t> numels = {256 * 300 - 9, 40, 256 * 7 + 9};
  const std::vector<std::vector<NormRun>> parts = {
      {{.begin = 0, .numel = 256 * 100, .first_block = 0, .tensor = 0, .is_last = false}},
      {{.begin = 0, .numel = 256 * 1, .first_block = 100, .tensor = 0, .is_last = false}},
      {{.begin = 0, .numel = 256 * 199 - 9, .first_block = 101, .tensor = 0},
       {.begin = 256 * 199, .numel = 40, .first_block = 0, .tensor = 1},
       {.begin = 256 * 200, .numel = 256 * 7 + 9, .first_block = 0, .tensor = 2}}};
  const std::vector<std::int32_t> ranks = {2, 0, 1};
  const NormTotals totals(numels, parts);
  constexpr std::size_t kSumsOffset = 48;
  const std::size_t bytes = kSumsOffset + totals.most_sums() * sizeof(double);
  std::vector<std::byte> messages(3 * bytes);
  std::vector<std::vector<double>> sums;
  std::vector<const double*> pointers;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    sums.push_back(cpu_sums(random_values(256 * 208, 20 + static_cast<std::uint32_t>(k)), parts[k]));
    std::memcpy(messages.data() + bytes * static_cast<std::size_t>(ranks[k]) + kSumsOffset, sums[k].data(),
                sums[k].size() * sizeof(double));
  }
  for (const auto& of_part : sums) pointers.push_back(of_part.data());
  std::vector<double> wanted(3);
  const double wanted_total = totals.add_up(pointers, wanted);

  const Shared<std::byte> device_messages(messages);
  const Shared<std::int32_t> part_ranks(ranks);
  const Shared<NormLink> links({totals.links().begin(), totals.links().end()});
  const Shared<std::uint32_t> first_link({totals.first_link().begin(), totals.first_link().end()});
  const Shared<double> scratch{std::vector<double>(totals.links().size())}, squares({0, 0, 0}), total({0});
  StepTables tables;
  tables.messages = {device_messages.data(), bytes, kSumsOffset};
  tables.norm = {3, part_ranks.data(), links.data(), first_link.data(), scratch.data(), squares.data(), total.data()};
  check(cuda::norm_totals(tables, nullptr));
  EXPECT_TRUE(same_bits(squares.values(), wanted));
  EXPECT_EQ(total.values()[0], wanted_total);
}

/// Returns the sum of squares as CPUs compute it: with 16 lanes over each block of 4096 elements, one block after the
/// other.
double squares_in_blocks(const std::vector<float>& values) {
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += kSquaredBlock) {
    double lanes[16] = {};
    const std::size_t end = std::min<std::size_t>(values.size(), begin + kSquaredBlock);
    for (std::size_t i = begin; i < end; ++i) lanes[(i - begin) % 16] += static_cast<double>(values[i]) * values[i];
    for (std::size_t width = 8; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    sum += lanes[0];
  }
  return sum;
}

/// Returns numbers that fp32, bf16 and fp16 can all hold. They are whole multiples of 2^-24, and some of them are below
/// fp16's normal numbers.
std::vector<float> narrow_values(std::size_t numel, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(numel);
  for (float& value : values) {
    const int number = static_cast<int>(generator() % 255) - 127;
    value = static_cast<float>(number) * (generator() % 2 == 0 ? 0x1p-24f : 0x1p-6f);
  }
  return values;
}

std::vector<std::byte> as_type(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      continue;
    }
    const std::uint32_t bits =
        dtype == DType::kBF16 ? ScalarLane::bits_of(values[i]) >> 16 : fp16_nearest<std::uint32_t>(values[i]);
    const auto half = static_cast<std::uint16_t>(bits);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

TEST_F(DeviceNorm, OwnSquaresHaveTheBitsOfLanesAndBlocks) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<Shared<std::byte>> memory;
    const Shared<double> block_sums{std::vector<double>(100)}, unit_sum({-1.0}), sum({0.0});
    const Shared<std::uint8_t> is_measured({0});
    OwnPieces pieces;
    pieces.dtype = dtype;
    pieces.block_sums = block_sums.data();
    pieces.unit_sum = unit_sum.data();
    pieces.sum = sum.data();
    pieces.is_measured = is_measured.data();
    double wanted = 0;
    const auto launch = [&](const std::vector<std::size_t>& sizes, bool begins, bool ends) {
      pieces.count = pieces.blocks = 0;
      pieces.begins = begins;
      pieces.ends = ends;
      for (const std::size_t numel : sizes) {
        const std::vector<float> values = narrow_values(numel, static_cast<std::uint32_t>(numel));
        pieces.pieces[pieces.count++] = {memory.emplace_back(as_type(dtype, values)).data(), numel, pieces.blocks};
        pieces.blocks += static_cast<std::uint32_t>((numel + kSquaredBlock - 1) / kSquaredBlock);
        wanted += squares_in_blocks(values);
      }
      check(cuda::own_squares(pieces, nullptr));
    };
    launch({1, 4097, 17, 4096, 200000}, true, false);  // one thread block takes fewer blocks than this
    EXPECT_EQ(sum.values()[0], 0.0) << "the unit is not complete";
    launch({15, 4095}, false, true);
    EXPECT_EQ(sum.values()[0], wanted);
    EXPECT_EQ(is_measured.values()[0], 1);
    launch({3}, true, true);
    EXPECT_TRUE(std::isnan(sum.values()[0])) << "the unit came twice";
  }
}

}  // namespace device_norm_test
}  // namespace tessera
