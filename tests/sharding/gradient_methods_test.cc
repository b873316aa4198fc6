// Compares the results of each method of CompressionConfig with a plain reference, over ranks on threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/comm/sum/level_codec.h"
#include "runtime/comm/sum/sign_codec.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

using Numbers = std::vector<float>;
constexpr std::int64_t kSteps = 5;

/// Returns a layout of three tensors. The first tensor ends within a block, so there are gaps.
Layout some_layout(int ranks) { return Layout::pack(std::vector<std::int64_t>{1000, 700, 3}, ranks); }

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

/// Returns the contribution of rank `rank` to a step. The gaps contain zeros.
Numbers contribution(const Layout& layout, int rank, std::int64_t step) {
  std::mt19937 generator(static_cast<unsigned>(100 * rank + step));
  std::normal_distribution<float> normal;
  Numbers values(size(layout.numel()), 0.0f);
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const Extent extent = layout.extent(i);
    for (std::int64_t k = extent.offset; k < extent.end(); ++k) values[size(k)] = normal(generator);
  }
  return values;
}

struct Memory {
  Numbers kept, work;
};
/// The numbers of the group's parameters.
constexpr std::int64_t kNumbers[] = {5, 6, 7};

/// The results of kSteps steps. `sums` [step] has the same bits on all ranks. `kept` [rank] is the rank's state after
/// these steps.
struct Made {
  std::vector<Numbers> sums;
  std::vector<Numbers> kept;
};

Made made_by(int ranks, const CompressionMethod& config) {
  const Layout layout = some_layout(ranks);
  const GroupShape shape{.layout = layout};
  const MethodMemory need = method_layout(config, shape, ranks).memory;
  std::vector<std::vector<Numbers>> sums(size(ranks));
  std::vector<Numbers> kept(size(ranks));
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, ranks));
    constexpr float kGuard = 1234.5f;
    Memory memory{Numbers(size(need.kept) + 1, 0.0f), Numbers(size(need.work) + 1, 7.0f)};
    memory.kept.back() = memory.work.back() = kGuard;
    const auto method = value_or_throw(
        make_gradient_method(config, {shape, kNumbers, mesh.rank(), ranks, memory.kept.data(), memory.work.data()}));
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      Numbers data = contribution(layout, mesh.rank(), step);
      method->begin_step(step);
      throw_if_error(method->sum(*axes.reduce, "some", data.data(), data.size()));
      sums[size(mesh.rank())].push_back(data);
    }
    EXPECT_EQ(memory.kept.back(), kGuard);
    EXPECT_EQ(memory.work.back(), kGuard);
    memory.kept.pop_back();
    kept[size(mesh.rank())] = memory.kept;
  });
  for (const auto& of_rank : sums) {
    for (std::size_t step = 0; step < of_rank.size(); ++step)
      EXPECT_EQ(std::memcmp(of_rank[step].data(), sums[0][step].data(), of_rank[step].size() * sizeof(float)), 0)
          << "ranks have other bits in step " << step + 1;
  }
  for (const Numbers& sum : sums[0]) {
    for (const Extent gap : layout.gaps()) {
      for (std::int64_t i = gap.offset; i < gap.end(); ++i) EXPECT_EQ(sum[size(i)], 0) << "in a gap";
    }
  }
  return {sums[0], kept};
}

/// Checks that every contribution was either sent or stored.
void expect_nothing_lost(int ranks, const Made& made) {
  const Layout layout = some_layout(ranks);
  std::vector<double> wanted(size(layout.numel())), got(wanted.size());
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      const Numbers values = contribution(layout, rank, step);
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += values[i];
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) got[i] += made.kept[size(rank)][i];
  }
  for (const Numbers& sum : made.sums) {
    for (std::size_t i = 0; i < wanted.size(); ++i) got[i] += sum[i];
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-4) << i;
}

TEST(RandomK, AllRanksSendTheSamePlacesAndKeepTheRest) {
  for (const int ranks : {2, 3}) {
    const Layout layout = some_layout(ranks);
    const std::int64_t count = count_of({.layout = layout}, 0.1);
    const Made made = made_by(ranks, RandomKConfig{.fraction = 0.1, .seed = 3});
    expect_nothing_lost(ranks, made);
    std::vector<Numbers> kept(size(ranks), Numbers(size(layout.numel()), 0.0f));
    std::vector<std::vector<std::size_t>> places;
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      Numbers wanted(size(layout.numel()), 0.0f);
      const Numbers& sum = made.sums[size(step - 1)];
      std::vector<std::size_t>& sent = places.emplace_back();
      for (std::size_t i = 0; i < sum.size(); ++i) {
        if (sum[i] != 0) sent.push_back(i);
      }
      EXPECT_LE(sent.size(), size(count));
      EXPECT_GE(sent.size() + size(count * layout.padding() / layout.numel()) + 5, size(count))
          << "but for what is drawn in gaps";
      for (int rank = 0; rank < ranks; ++rank) {
        const Numbers values = contribution(layout, rank, step);
        for (std::size_t i = 0; i < values.size(); ++i) kept[size(rank)][i] += values[i];
        for (const std::size_t i : sent) wanted[i] += std::exchange(kept[size(rank)][i], 0.0f);
      }
      EXPECT_EQ(sum, wanted) << "step " << step;
    }
    EXPECT_NE(places[0], places[1]);
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_TRUE(std::ranges::equal(kept[size(rank)], std::span(made.kept[size(rank)]).first(kept[0].size())));
  }
}

/// A method on one rank alone, for one tensor of `numel` elements without gaps, and the method's memory.
struct Alone {
  Alone(const CompressionMethod& config, std::int64_t numel)
      : shape{.layout = Layout::pack(std::vector<std::int64_t>{numel}, 1)} {
    const MethodMemory need = method_layout(config, shape, 1).memory;
    kept.resize(size(need.kept));
    work.resize(size(need.work));
    method = value_or_throw(make_gradient_method(config, {shape, kNumbers, 0, 1, kept.data(), work.data()}));
  }

  /// Sums these gradients over ranks, in place.
  void reduce(const MeshAxes& axes, std::int64_t step, Numbers& data) {
    method->begin_step(step);
    throw_if_error(method->sum(*axes.reduce, "some", data.data(), data.size()));
  }
  /// Sums gradients that all equal `value`, and returns the value that all sums have.
  float reduce_equal(const MeshAxes& axes, std::int64_t step, float value) {
    Numbers data(size(shape.layout.numel()), value);
    reduce(axes, step, data);
    for (const float each : data) EXPECT_EQ(each, data[0]);
    return data[0];
  }

  const GroupShape shape;
  Numbers kept, work;
  std::unique_ptr<GradientMethod> method;
};

// One-bit compression loses nothing if all numbers are equal. Momentum decays once per step, since all reductions of a
// step count as one reduction of their sum.
TEST(OneBitMomentum, MomentumDecaysOncePerStepOverSeveralReductions) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, 1));
    Alone alone(OneBitConfig{.momentum = 0.5}, 256);
    const float* const momentum = &alone.kept[alone.kept.size() - 256];
    EXPECT_EQ(alone.reduce_equal(axes, 1, 4), 4);
    EXPECT_EQ(*momentum, 2);
    EXPECT_EQ(alone.reduce_equal(axes, 1, 4), 4);
    EXPECT_EQ(*momentum, 4);
    EXPECT_EQ(alone.reduce_equal(axes, 2, 1), 1);
    EXPECT_EQ(*momentum, 2.5f);
    // The step is dropped, and the state of the method begins at 0 again.
    std::ranges::fill(alone.kept, 0.0f);
    alone.method->begin_step(0);
    EXPECT_EQ(alone.reduce_equal(axes, 2, 3), 3);
    EXPECT_EQ(*momentum, 1.5f);
  });
}

TEST(RandomK, EveryElementIsDrawnEquallyOften) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, 1));
    constexpr std::size_t kNumel = 128, kDrawn = 13;
    Alone alone(RandomKConfig{.fraction = 0.1, .seed = 1}, kNumel);
    std::vector<int> times(kNumel);
    for (std::int64_t step = 1; step <= 2000; ++step) {
      Numbers data(kNumel, 1.0f);
      alone.reduce(axes, step, data);
      for (std::size_t i = 0; i < kNumel; ++i) times[i] += data[i] != 0;
    }
    EXPECT_EQ(std::accumulate(times.begin(), times.end(), 0), 2000 * static_cast<int>(kDrawn));
    for (const int each : times) EXPECT_NEAR(each, 2000.0 * kDrawn / kNumel, 75);
  });
}

TEST(MajorityVote, SumIsTheSignOfTheMajority) {
  for (const int ranks : {1, 2, 3, 5}) {
    const Layout layout = some_layout(ranks);
    const Made made = made_by(ranks, SignMajorityConfig());
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      for (std::size_t t = 0; t < layout.size(); ++t) {
        for (std::int64_t i = layout.extent(t).offset; i < layout.extent(t).end(); ++i) {
          int minus = 0;
          for (int rank = 0; rank < ranks; ++rank) minus += contribution(layout, rank, step)[size(i)] < 0;
          const bool negative = 2 * minus == ranks ? (i + step) % 2 == 1 : 2 * minus > ranks;
          ASSERT_EQ(made.sums[size(step - 1)][size(i)], static_cast<float>(negative ? -ranks : ranks)) << i;
          i += 6;
        }
      }
    }
  }
}

/// Returns the signs that are sent for `kept` + `more`, and stores the rest in `kept`.
Numbers sent_as_signs(Numbers& kept, const Numbers& more, std::size_t begin, std::size_t numel) {
  Numbers sent(numel);
  std::vector<std::uint32_t> message(scaled_sign_words(numel));
  encode_signs(kept.data() + begin, more.empty() ? nullptr : more.data() + begin, numel, message.data());
  decode_signs(message.data(), numel, sent.data());
  return sent;
}

void clear_gaps(const Layout& layout, Numbers& values) {
  for (const Extent gap : layout.gaps()) std::fill_n(&values[size(gap.offset)], gap.numel, 0.0f);
}

TEST(SignFeedback, SumAddsWhatRanksSendAndTheRestIsKept) {
  for (const int ranks : {2, 3}) {
    const Layout layout = some_layout(ranks);
    const Made made = made_by(ranks, SignFeedbackConfig());
    expect_nothing_lost(ranks, made);
    std::vector<Numbers> kept(size(ranks), Numbers(size(layout.numel()), 0.0f));
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      Numbers wanted(size(layout.numel()), -0.0f);
      for (int rank = 0; rank < ranks; ++rank) {
        const Numbers sent = sent_as_signs(kept[size(rank)], contribution(layout, rank, step), 0, wanted.size());
        for (std::size_t i = 0; i < sent.size(); ++i) wanted[i] += sent[i];
        clear_gaps(layout, kept[size(rank)]);
      }
      clear_gaps(layout, wanted);
      EXPECT_EQ(made.sums[size(step - 1)], wanted);
    }
  }
}

TEST(OneBit, ResidualsOfContributionsAndSumsAreKept) {
  for (const int ranks : {2, 3}) {
    const Layout layout = some_layout(ranks);
    const Made made = made_by(ranks, OneBitConfig());
    const std::size_t numel = size(layout.numel());
    std::vector<Numbers> kept(size(ranks), Numbers(numel, 0.0f));
    Numbers of_sums(numel, 0.0f);
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      Numbers wanted(numel, 0.0f);
      for (int rank = 0; rank < ranks; ++rank) {
        const Numbers sent = sent_as_signs(kept[size(rank)], contribution(layout, rank, step), 0, numel);
        for (std::size_t i = 0; i < numel; ++i) of_sums[i] += sent[i];
        clear_gaps(layout, kept[size(rank)]);
      }
      clear_gaps(layout, of_sums);
      wanted = sent_as_signs(of_sums, {}, 0, numel);
      clear_gaps(layout, wanted);
      clear_gaps(layout, of_sums);
      EXPECT_EQ(made.sums[size(step - 1)], wanted);
    }
    // Each owner stores the feedback of its sums behind the feedback of its contributions.
    Made all = made;
    for (int rank = 0; rank < ranks; ++rank) {
      const Extent own = owned_by(rank, layout.numel(), ranks);
      const float* const behind = &made.kept[size(rank)][size(MatrixDeal::in_whole_lines(layout.numel()))];
      for (std::int64_t i = 0; i < own.numel; ++i) {
        EXPECT_EQ(behind[i], of_sums[size(own.offset + i)]);
        all.kept[size(rank)][size(own.offset + i)] += behind[i];
      }
    }
    expect_nothing_lost(ranks, all);
  }
}

TEST(LevelMethod, SumAddsEachRanksSeededDraws) {
  for (const LevelForm form : {LevelForm{1, LevelNorm::kMagnitude}, LevelForm{7, LevelNorm::kSquares}}) {
    for (const int ranks : {2, 3}) {
      const Layout layout = some_layout(ranks);
      const auto run = [&](std::int64_t seed) {
        if (form.norm == LevelNorm::kMagnitude) return made_by(ranks, TernGradConfig{.seed = seed});
        return made_by(ranks, QsgdConfig{.levels = form.levels, .seed = seed});
      };
      const Made made = run(3);
      std::vector<DrawStream> draws;
      for (int rank = 0; rank < ranks; ++rank) draws.emplace_back(3, kNumbers[0], rank);
      for (std::int64_t step = 1; step <= kSteps; ++step) {
        Numbers wanted(size(layout.numel()), 0.0f);
        for (int rank = 0; rank < ranks; ++rank) {
          const Numbers values = contribution(layout, rank, step);
          std::vector<std::uint32_t> message(level_words(form.levels, values.size()));
          draws[size(rank)].begin_step(step);
          encode_levels(form, values.data(), values.size(), draws[size(rank)].next(), message.data());
          add_levels(form, message.data(), values.size(), wanted.data());
        }
        EXPECT_EQ(made.sums[size(step - 1)], wanted);
      }
      EXPECT_EQ(run(3).sums, made.sums);
      EXPECT_NE(run(4).sums, made.sums);
    }
  }
}

TEST(TopKMomentum, LargestAccumulatedElementsAreSent) {
  for (const int ranks : {2, 3}) {
    constexpr float kMomentum = 0.5f;
    const Layout layout = some_layout(ranks);
    const std::size_t numel = size(layout.numel());
    const std::int64_t count = count_of({.layout = layout}, 0.2);
    const Made made = made_by(ranks, TopKConfig{.fraction = 0.2, .momentum = kMomentum});
    std::vector<Numbers> moving(size(ranks), Numbers(numel, 0.0f)), kept = moving;
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      Numbers wanted(numel, 0.0f);
      for (int rank = 0; rank < ranks; ++rank) {
        Numbers &u = moving[size(rank)], &v = kept[size(rank)];
        const Numbers values = contribution(layout, rank, step);
        for (std::size_t i = 0; i < numel; ++i) {
          u[i] = kMomentum * u[i] + values[i];
          v[i] += u[i];
        }
        std::vector<std::size_t> order(numel);
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return std::fabs(v[i]); });
        order.resize(size(count));
        for (const std::size_t i : order) {
          wanted[i] += std::exchange(v[i], 0.0f);
          u[i] = 0;
        }
      }
      EXPECT_EQ(made.sums[size(step - 1)], wanted);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const std::span<const float> both = made.kept[size(rank)];
      EXPECT_TRUE(std::ranges::equal(both.first(numel), kept[size(rank)]));
      EXPECT_TRUE(std::ranges::equal(both.subspan(size(MatrixDeal::in_whole_lines(layout.numel())), numel),
                                     moving[size(rank)]));
    }
  }
}

// The method compresses momentum. If an optimizer gets the method's results as gradients, it uses the ranks' compressed
// momentum.
TEST(OneBitMomentum, SumMovesAsTheMomentumOfAllRanks) {
  constexpr float kMomentum = 0.75f;
  for (const int ranks : {2, 3}) {
    const Layout layout = some_layout(ranks);
    const std::size_t numel = size(layout.numel());
    const Made made = made_by(ranks, OneBitConfig{.momentum = kMomentum});
    std::vector<Numbers> kept(size(ranks), Numbers(numel, 0.0f));
    Numbers of_sums(numel, 0.0f), momentum(numel, 0.0f), of_optimizer(numel, 0.0f);
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      for (int rank = 0; rank < ranks; ++rank) {
        Numbers values = contribution(layout, rank, step);
        for (std::size_t i = 0; i < numel; ++i) {
          const volatile float before = kMomentum * momentum[i], now = (1 - kMomentum) * values[i];
          values[i] = before + now;
        }
        const Numbers sent = sent_as_signs(kept[size(rank)], values, 0, numel);
        for (std::size_t i = 0; i < numel; ++i) of_sums[i] += sent[i];
        clear_gaps(layout, kept[size(rank)]);
      }
      clear_gaps(layout, of_sums);
      Numbers sum = sent_as_signs(of_sums, {}, 0, numel);
      clear_gaps(layout, sum);
      clear_gaps(layout, of_sums);
      const Numbers& gradients = made.sums[size(step - 1)];
      for (std::size_t i = 0; i < numel; ++i) {
        momentum[i] = sum[i] * (1.0f / static_cast<float>(ranks));
        of_optimizer[i] = kMomentum * of_optimizer[i] + (1 - kMomentum) * gradients[i];
        ASSERT_NEAR(of_optimizer[i], sum[i], 1e-5) << "step " << step << ", element " << i;
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const std::span<const float> all = made.kept[size(rank)];
      EXPECT_TRUE(std::ranges::equal(all.first(numel), kept[size(rank)]));
      EXPECT_TRUE(
          std::ranges::equal(all.last(size(MatrixDeal::in_whole_lines(layout.numel()))).first(numel), momentum));
    }
  }
}

// Two reductions of a step count as one reduction of their sum. The last element is the largest, so it is sent.
TEST(TopKMomentum, MomentumDecaysOncePerStepOverSeveralReductions) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    const MeshAxes axes = value_or_throw(MeshGroups::of(mesh).axes(1, 1));
    Alone alone(TopKConfig{.fraction = 1e-9, .momentum = 0.5}, 64);
    const auto reduce = [&](std::int64_t step, float value) {
      Numbers data(64, value);
      data.back() = 100 * value;
      alone.reduce(axes, step, data);
      EXPECT_EQ(data[0], 0);
    };
    reduce(1, 4);
    reduce(1, 4);
    EXPECT_EQ(alone.kept[64], 8);  // the momentum (u of the paper)
    EXPECT_EQ(alone.kept[0], 8);   // the values that were not sent (v)
    reduce(2, 1);
    reduce(2, 1);
    EXPECT_EQ(alone.kept[64], 6);
    EXPECT_EQ(alone.kept[0], 14);
  });
}

TEST(MethodLayout, OwnedPartsCoverAllElements) {
  for (std::int64_t numel = 0; numel < 1100; ++numel) {
    for (const int ranks : {1, 2, 3, 5}) {
      std::int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Extent own = owned_by(rank, numel, ranks);
        EXPECT_TRUE(own.offset == end && own.numel <= owned_by_each(numel, ranks));
        end = own.end();
      }
      EXPECT_EQ(end, numel);
    }
  }
}

}  // namespace
}  // namespace tessera
