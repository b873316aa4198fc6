// Tests which samples each rank gets. Each sample occurs once, for any number of ranks. A run that was stopped
// continues with the next sample, even on another number of ranks.

#include "runtime/data/sampler.h"

#include <gmock/gmock.h>

#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "runtime/base/status.h"
#include "tests/data/test_files.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using Samples = std::vector<std::int64_t>;

DistributedSampler make(const SamplerOptions& options) {
  auto sampler = DistributedSampler::create(options);
  EXPECT_TRUE(sampler.ok()) << sampler.status();
  return *std::move(sampler);
}

SamplerOptions with_ranks(SamplerOptions options, int rank, int world_size) {
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

/// Returns the samples of all ranks in the order of microbatches, and within a microbatch in the order of ranks.
std::vector<Samples> microbatches(const SamplerOptions& options, std::int64_t epoch) {
  std::vector<DistributedSampler> ranks;
  for (int rank = 0; rank < options.world_size; ++rank) {
    ranks.push_back(make(with_ranks(options, rank, options.world_size)));
    ranks.back().set_epoch(epoch);
  }
  std::vector<Samples> result;
  while (true) {
    Samples all, own(static_cast<std::size_t>(options.batch));
    int gave = 0;
    for (auto& rank : ranks) {
      if (!rank.next(own)) continue;
      ++gave;
      all.insert(all.end(), own.begin(), own.end());
    }
    EXPECT_TRUE(gave == 0 || gave == options.world_size);  // all ranks end together
    if (gave == 0) return result;
    result.push_back(all);
  }
}

Samples flat(const std::vector<Samples>& parts) {
  Samples result;
  for (const auto& part : parts) result.insert(result.end(), part.begin(), part.end());
  return result;
}

TEST(Sampler, WindowCountLeavesOneTokenForTheLastTarget) {
  EXPECT_EQ(num_windows(0, 4), 0);
  EXPECT_EQ(num_windows(4, 4), 0);
  EXPECT_EQ(num_windows(5, 4), 1);
  EXPECT_EQ(num_windows(8, 4), 1);
  EXPECT_EQ(num_windows(9, 4), 2);
}

/// Each sample occurs once, apart from the samples that the tail drops or repeats. This holds for every size, number of
/// ranks, batch, accumulation, tail and epoch.
TEST(Sampler, EachSampleComesOnceOverAllRanks) {
  for (const std::int64_t samples : {1, 2, 7, 8, 31, 64, 100}) {
    for (int world = 1; world <= 8; ++world) {
      for (const std::int64_t batch : {1, 2, 3}) {
        for (const std::int64_t accumulation : {1, 2}) {
          for (const Tail tail : {Tail::kDrop, Tail::kPad}) {
            SamplerOptions options;
            options.num_samples = samples;
            options.batch = batch;
            options.accumulation = accumulation;
            options.world_size = world;
            options.tail = tail;
            options.seed = 17;
            if (tail == Tail::kDrop && samples < options.global_batch()) {
              EXPECT_EQ(exit_code_of(DistributedSampler::create(options).status()), ExitCode::kCorruptData);
              continue;
            }
            const auto sampler = make(options);
            for (const std::int64_t epoch : {0, 1, 5}) {
              const auto parts = microbatches(options, epoch);
              ASSERT_EQ(parts.size() % static_cast<std::size_t>(accumulation), 0u);
              ASSERT_EQ(static_cast<std::int64_t>(parts.size()), sampler.steps_per_epoch() * accumulation);
              const Samples all = flat(parts);
              const std::set<std::int64_t> distinct(all.begin(), all.end());
              const auto repeated = static_cast<std::int64_t>(all.size() - distinct.size());
              ASSERT_EQ(static_cast<std::int64_t>(distinct.size()), samples - sampler.dropped_samples());
              ASSERT_EQ(repeated, sampler.padded_samples());
              ASSERT_EQ(tail == Tail::kDrop ? sampler.padded_samples() : sampler.dropped_samples(), 0);
              ASSERT_LT(sampler.padded_samples() + sampler.dropped_samples(), options.global_batch());
              ASSERT_TRUE(*distinct.begin() >= 0 && *distinct.rbegin() < samples);
              // The padding repeats the first samples of the epoch.
              for (std::size_t i = static_cast<std::size_t>(samples); i < all.size(); ++i)
                ASSERT_EQ(all[i], all[i % static_cast<std::size_t>(samples)]);
            }
          }
        }
      }
    }
  }
}

/// Step k of a global batch takes the same samples for every way to divide it into ranks, batches and microbatches.
TEST(Sampler, StepsDoNotDependOnTheRanks) {
  constexpr std::int64_t kGlobal = 24;
  for (const Tail tail : {Tail::kDrop, Tail::kPad}) {
    SamplerOptions options;
    options.num_samples = 331;
    options.tail = tail;
    options.seed = 4;
    options.batch = kGlobal;
    const auto reference = microbatches(options, 3);  // the reference has one rank and one microbatch a step
    int ways = 0;
    for (int world = 1; world <= 8; ++world) {
      for (std::int64_t accumulation = 1; accumulation <= kGlobal; ++accumulation) {
        if (kGlobal % (world * accumulation) != 0) continue;
        options.world_size = world;
        options.accumulation = accumulation;
        options.batch = kGlobal / (world * accumulation);
        EXPECT_EQ(flat(microbatches(options, 3)), flat(reference)) << world << " ranks, " << accumulation;
        ++ways;
      }
    }
    EXPECT_GT(ways, 20);
  }
}

TEST(Sampler, RankTakesItsRunOfTheGlobalBatch) {
  SamplerOptions options;
  options.num_samples = 40;
  options.batch = 3;
  options.world_size = 4;
  const EpochOrder order(options.num_samples, options.seed, options.shuffle, /*epoch=*/0);
  for (int rank = 0; rank < 4; ++rank) {
    auto sampler = make(with_ranks(options, rank, 4));
    Samples own(3);
    for (std::int64_t step = 0; sampler.next(own); ++step)
      for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ(own[static_cast<std::size_t>(i)], order(step * 12 + rank * 3 + i));
  }
}

TEST(Sampler, EpochsDiffer) {
  SamplerOptions options;
  options.num_samples = 200;
  EXPECT_EQ(flat(microbatches(options, 1)), flat(microbatches(options, 1)));
  EXPECT_NE(flat(microbatches(options, 1)), flat(microbatches(options, 2)));
  options.shuffle = false;
  Samples in_order(200);
  std::iota(in_order.begin(), in_order.end(), 0);
  EXPECT_EQ(flat(microbatches(options, 1)), in_order);
}

/// Dropping is fair over many epochs: each sample is left out about as often as any other.
TEST(Sampler, EachSampleIsDroppedEquallyOften) {
  SamplerOptions options;
  options.num_samples = 10;
  options.batch = 8;
  std::map<std::int64_t, int> seen;
  for (std::int64_t epoch = 0; epoch < 5000; ++epoch)
    for (const auto sample : flat(microbatches(options, epoch))) ++seen[sample];
  ASSERT_EQ(seen.size(), 10u);
  for (const auto& [sample, times] : seen) EXPECT_NEAR(times, 4000, 120) << sample;  // standard deviation: 28
}

/// A run stops after any step and continues with another number of ranks. Its samples are those of a run that did not
/// stop.
TEST(Sampler, ResumesWithAnotherNumberOfRanks) {
  SamplerOptions options;
  options.num_samples = 100;
  options.batch = 12;
  for (const Tail tail : {Tail::kDrop, Tail::kPad}) {
    options.tail = tail;
    options.batch = 12;
    options.world_size = 1;
    const auto whole = microbatches(options, 2);
    for (std::size_t stop = 0; stop <= whole.size(); ++stop) {
      auto before = make(with_ranks(options, 0, 1));
      before.set_epoch(2);
      Samples ignored(12);
      for (std::size_t i = 0; i < stop; ++i) ASSERT_TRUE(before.next(ignored));
      const SamplerCursor cursor = before.cursor();
      EXPECT_EQ(cursor.consumed, static_cast<std::int64_t>(12 * stop));
      auto later = options;
      later.batch = 3;
      Samples rest, own(3);
      std::vector<DistributedSampler> ranks;
      for (int rank = 0; rank < 4; ++rank) {
        ranks.push_back(make(with_ranks(later, rank, 4)));
        ASSERT_TRUE(ranks.back().resume(cursor).ok());
        EXPECT_EQ(ranks.back().epoch(), 2);
      }
      for (bool more = true; more;)
        for (auto& rank : ranks)
          if ((more = rank.next(own))) rest.insert(rest.end(), own.begin(), own.end());
      EXPECT_EQ(rest, flat({whole.begin() + static_cast<long>(stop), whole.end()}));
    }
  }
}

TEST(Sampler, ResumingWithOtherDataIsRefused) {
  SamplerOptions options;
  options.num_samples = 50;
  options.seed = 1;
  auto sampler = make(options);
  const SamplerCursor cursor = sampler.cursor();
  const auto refused = [&](auto change, ExitCode code) {
    SamplerCursor other = cursor;
    change(other);
    EXPECT_EQ(exit_code_of(sampler.resume(other)), code);
  };
  EXPECT_TRUE(sampler.resume(cursor).ok());
  refused([](auto& c) { c.num_samples = 51; }, ExitCode::kConfig);
  refused([](auto& c) { c.seed = 2; }, ExitCode::kConfig);
  refused([](auto& c) { c.shuffle = false; }, ExitCode::kConfig);
  refused([](auto& c) { c.consumed = -1; }, ExitCode::kCorruptData);
  refused([](auto& c) { c.consumed = std::int64_t{1} << 62; }, ExitCode::kCorruptData);
  refused([](auto& c) { c.epoch = -1; }, ExitCode::kCorruptData);
}

TEST(Sampler, WrongOptionsAreRefused) {
  const auto code = [](auto change) {
    SamplerOptions options;
    options.num_samples = 100;
    change(options);
    return exit_code_of(DistributedSampler::create(options).status());
  };
  EXPECT_EQ(code([](auto& o) { o.batch = 0; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.accumulation = 0; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.world_size = 0; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.rank = 1; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.rank = -1; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.batch = std::int64_t{1} << 62; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.batch = o.accumulation = std::int64_t{1} << 40; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.batch = 101; }), ExitCode::kCorruptData);
  EXPECT_EQ(code([](auto& o) { o.batch = 101, o.tail = Tail::kPad; }), ExitCode::kOk);
  EXPECT_EQ(code([](auto& o) { o.num_samples = 0, o.tail = Tail::kPad; }), ExitCode::kCorruptData);
  EXPECT_EQ(code([](auto& o) { o.num_samples = -5; }), ExitCode::kCorruptData);
}

TEST(Sampler, WindowsAreCopiedAndBadTokensNamed) {
  const TestFolder folder;
  const auto dataset = open_dataset(folder.write("a.txt", "abcdefghij"));
  ASSERT_TRUE(dataset.ok());
  Samples tokens(2 * 4);
  ASSERT_TRUE(copy_windows(**dataset, Samples{2, 0}, 3, tokens).ok());
  EXPECT_EQ(tokens, (Samples{'g', 'h', 'i', 'j', 'a', 'b', 'c', 'd'}));
  EXPECT_EQ(exit_code_of(copy_windows(**dataset, Samples{3, 0}, 3, tokens)), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(copy_windows(**dataset, Samples{-1, 0}, 3, tokens)), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(copy_windows(**dataset, Samples{0}, 3, tokens)), ExitCode::kInternal);
  const auto status = copy_windows(**dataset, Samples{2, 0}, 3, tokens, 'j');
  EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(status), HasSubstr("a.txt at byte 9: token 9 is 106"));
}

// The microbatches of a step have the same samples on any number of ranks. A rank's microbatches are neighbours, and
// every rank's cursor is that of a run on one rank.
TEST(Sampler, DealtRunsCoverEachStepOnceAndTheirCursorGoesOnAnywhere) {
  const SamplerOptions one{.num_samples = 100, .batch = 2, .accumulation = 8, .seed = 5};
  SamplerOptions two = one;
  two.accumulation = 4;
  two.runs = true;
  DistributedSampler alone = make(one), fast = make(with_ranks(two, 0, 2)), slow = make(with_ranks(two, 1, 2));
  const std::int64_t cuts[] = {4, 7, 1, 5};  // microbatches of the fast rank in each step
  for (const std::int64_t cut : cuts) {
    ASSERT_TRUE(fast.deal({0, cut}).ok() && slow.deal({cut, 8}).ok());
    Samples wanted(2), own(2);
    for (std::int64_t i = 0; i < 8; ++i) {
      ASSERT_TRUE(alone.next(wanted));
      ASSERT_TRUE((i < cut ? fast : slow).next(own));
      EXPECT_EQ(own, wanted) << i << " of " << cut;
    }
    EXPECT_EQ(fast.cursor(), alone.cursor());
    EXPECT_EQ(slow.cursor(), alone.cursor());
  }
  Samples own(2);
  ASSERT_TRUE(fast.next(own));
  EXPECT_THAT(message_of(fast.deal({0, 4})), HasSubstr("dealt within a step"));
  EXPECT_EQ(fast.cursor(), alone.cursor()) << "the step's beginning";
  for (const MicrobatchRun wrong : {MicrobatchRun{3, 3}, MicrobatchRun{-1, 2}, MicrobatchRun{4, 9}})
    EXPECT_THAT(message_of(slow.deal(wrong)), HasSubstr("a step has 8")) << wrong.begin;
}

TEST(Sampler, StepByItsNumberHasTheSamplesThatItHasInOrder) {
  SamplerOptions options{.num_samples = 23, .batch = 2, .accumulation = 3, .seed = 5};
  for (const Tail tail : {Tail::kDrop, Tail::kPad}) {
    options.tail = tail;
    DistributedSampler in_order = make(options);
    std::vector<std::vector<Samples>> steps(9);  // steps of more than two epochs
    Samples own(2);
    for (auto& step : steps) {
      for (int i = 0; i < 3; ++i) {
        if (!in_order.next(own)) {
          in_order.set_epoch(in_order.epoch() + 1);
          ASSERT_TRUE(in_order.next(own));
        }
        step.push_back(own);
      }
    }
    DistributedSampler jumps = make(options);
    for (const std::size_t step : {4, 0, 8, 5, 4}) {
      ASSERT_TRUE(jumps.go_to_step(static_cast<std::int64_t>(step)).ok());
      for (const Samples& wanted : steps[step]) {
        ASSERT_TRUE(jumps.next(own));
        EXPECT_EQ(own, wanted) << step;
      }
    }
    EXPECT_THAT(message_of(jumps.go_to_step(-1)), HasSubstr("there is no step -1"));
  }
}

TEST(Sampler, DataOrderIsThatOfAllRanksAndDiffersWhereSamplesOfStepsDo) {
  const SamplerOptions options{.num_samples = 23, .batch = 2, .accumulation = 3, .world_size = 2, .seed = 5};
  const std::int64_t order = make(options).data_order(24, 1);
  SamplerOptions other = options;
  other.rank = 1;
  EXPECT_EQ(make(other).data_order(24, 1), order);
  EXPECT_NE(make(options).data_order(25, 1), order);
  EXPECT_NE(make(options).data_order(24, 2), order);
  for (const auto& change : std::vector<std::function<void(SamplerOptions&)>>{
           [](SamplerOptions& changed) { changed.num_samples = 22; },
           [](SamplerOptions& changed) { changed.batch = 1; },
           [](SamplerOptions& changed) { changed.accumulation = 2; }, [](SamplerOptions& changed) { changed.seed = 6; },
           [](SamplerOptions& changed) { changed.shuffle = false; },
           [](SamplerOptions& changed) { changed.tail = Tail::kPad; }}) {
    other = options;
    change(other);
    EXPECT_NE(make(other).data_order(24, 1), order);
  }
}

TEST(Sampler, MicrobatchesThatTheRanksDoNotDivideAreDealtInRuns) {
  SamplerOptions options{.num_samples = 30, .batch = 2, .accumulation = 7, .seed = 5};
  DistributedSampler one = make(options);
  options.accumulation = 1;
  options.microbatches = 7;
  std::vector<DistributedSampler> three;
  for (int rank = 0; rank < 3; ++rank) three.push_back(make(with_ranks(options, rank, 3)));
  Samples wanted(2), own(2);
  for (const std::size_t rank : {0, 0, 1, 1, 2, 2, 2, 0, 0}) {
    ASSERT_TRUE(one.next(wanted));
    ASSERT_TRUE(three[rank].next(own));
    EXPECT_EQ(own, wanted);
  }
  options.microbatches = 2;
  const auto too_few = DistributedSampler::create(with_ranks(options, 0, 3));
  EXPECT_THAT(message_of(too_few.status()), HasSubstr("at least one for each of 3 ranks"));
}

TEST(Sampler, MicrobatchesByTheirNumberAreThoseOfTheStepUnderWay) {
  SamplerOptions options{.num_samples = 30, .batch = 2, .accumulation = 4, .seed = 5, .tail = Tail::kPad};
  DistributedSampler one = make(options);
  options.accumulation = 2;
  DistributedSampler slow = make(with_ranks(options, 1, 2));
  Samples wanted(2), own(2);
  for (int step = 0; step < 5; ++step) {  // the fifth step belongs to the second epoch
    std::vector<Samples> whole;
    if (step == 4) one.set_epoch(1);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(one.next(wanted));
      whole.push_back(wanted);
    }
    if (step == 4) {
      EXPECT_FALSE(*slow.take(0, own));
      slow.set_epoch(1);
    }
    for (const std::int64_t i : {2, 3, 1}) {
      ASSERT_TRUE(*slow.take(i, own));
      EXPECT_EQ(own, whole[static_cast<std::size_t>(i)]) << step;
    }
    slow.end_step();
    EXPECT_EQ(slow.cursor(), one.cursor());
  }
  for (const std::int64_t wrong : {-1, 4})
    EXPECT_THAT(message_of(slow.take(wrong, own).status()), HasSubstr("has 0 to 3"));
  ASSERT_TRUE(slow.next(own));
  EXPECT_THAT(message_of(slow.take(0, own).status()), HasSubstr("asked for by its number within a step"));
}

TEST(Sampler, RunsGiveEachRankNeighboursOfTheSameMicrobatches) {
  constexpr std::int64_t kAll = 12;
  for (const Tail tail : {Tail::kDrop, Tail::kPad}) {
    for (const bool runs : {false, true}) {
      SamplerOptions one{.num_samples = 200, .batch = 3, .accumulation = kAll, .seed = 5, .runs = runs, .tail = tail};
      const std::vector<Samples> wanted = microbatches(one, 1);
      for (const int ranks : {2, 3, 4, 12}) {
        const std::int64_t each = kAll / ranks;
        for (int rank = 0; rank < ranks; ++rank) {
          SamplerOptions options = with_ranks(one, rank, ranks);
          options.accumulation = each;
          DistributedSampler sampler = make(options);
          sampler.set_epoch(1);
          Samples own(3);
          for (std::size_t step = 0; step < wanted.size() / kAll; ++step) {
            if (step == 1) {
              const SamplerCursor cursor = sampler.cursor();
              sampler = make(options);
              ASSERT_TRUE(sampler.resume(cursor).ok());
            }
            for (std::int64_t round = 0; round < each; ++round) {
              ASSERT_TRUE(sampler.next(own));
              const std::int64_t index = runs ? rank * each + round : round * ranks + rank;
              EXPECT_EQ(own, wanted[step * kAll + static_cast<std::size_t>(index)])
                  << "rank " << rank << " of " << ranks << ", step " << step << ", round " << round;
            }
          }
          EXPECT_FALSE(sampler.next(own));
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
