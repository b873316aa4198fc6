// Tests that RankSampler has the properties of PyTorch's DistributedSampler, both alone and inside LibTorch's
// DataLoader, and that different seeds give different orders.

#include "tessera/rank_sampler.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tessera/seed_for_rank.h"
#include "tessera/uneven.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using Samples = std::vector<std::size_t>;

/// Calls `body` with the mesh of each rank, on its thread.
void on_each_rank(int ranks, const std::function<void(const Mesh&)>& body) { run_ranks({.ranks = ranks}, body); }

Samples rest_of_epoch(RankSampler& sampler, std::size_t batch = 3) {
  Samples all;
  while (const auto batch_of = sampler.next(batch)) all.insert(all.end(), batch_of->begin(), batch_of->end());
  return all;
}

/// Returns the samples that each rank gets in epochs 0, 1, ..., one epoch after the other: [rank][epoch].
std::vector<std::vector<Samples>> dealt(int ranks, std::size_t samples, const RankSamplerOptions& options, int epochs) {
  std::vector<std::vector<Samples>> all(ranks);
  on_each_rank(ranks, [&](const Mesh& mesh) {
    RankSampler sampler(samples, mesh, options);
    for (int epoch = 0; epoch < epochs; ++epoch) {
      sampler.reset();
      EXPECT_EQ(sampler.epoch(), options.epoch + epoch);
      all[mesh.rank()].push_back(rest_of_epoch(sampler));
      EXPECT_EQ(all[mesh.rank()].back().size(), sampler.size());
    }
  });
  return all;
}

std::map<std::size_t, int> times_of(const std::vector<std::vector<Samples>>& all, std::size_t epoch) {
  std::map<std::size_t, int> times;
  for (const auto& of_rank : all)
    for (const std::size_t sample : of_rank[epoch]) ++times[sample];
  return times;
}

TEST(RankSampler, EachSampleGoesToOneRankInEqualNumbers) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const std::size_t samples : {1, 2, 3, 5, 12, 31, 1000}) {
      for (const Tail tail : {Tail::kPad, Tail::kDrop}) {
        const auto count = static_cast<std::size_t>(ranks);
        if (tail == Tail::kDrop && samples < count) continue;
        const auto all = dealt(ranks, samples, {.seed = 5, .tail = tail}, 2);
        const std::size_t each = tail == Tail::kPad ? (samples + count - 1) / count : samples / count;
        for (std::size_t epoch : {0, 1}) {
          for (const auto& of_rank : all) EXPECT_EQ(of_rank[epoch].size(), each);
          const auto times = times_of(all, epoch);
          EXPECT_EQ(times.size(), tail == Tail::kPad ? samples : each * count);
          const int most = static_cast<int>((each * count + samples - 1) / samples);
          for (const auto& [sample, n] : times) {
            EXPECT_LT(sample, samples);
            EXPECT_LE(n, tail == Tail::kPad ? most : 1);
          }
        }
      }
    }
  }
}

TEST(RankSampler, SeedDecidesADifferentOrderForEachEpoch) {
  const RankSamplerOptions options{.seed = 5};
  const auto all = dealt(3, 100, options, 3);
  EXPECT_EQ(all, dealt(3, 100, options, 3));
  EXPECT_NE(all[0][0], all[0][1]);
  EXPECT_NE(all[0][1], all[0][2]);
  EXPECT_NE(all, dealt(3, 100, {.seed = 6}, 3));
  // Other epochs have the samples that the first one leaves out.
  const auto dropped = dealt(4, 7, {.seed = 5, .tail = Tail::kDrop}, 8);
  std::set<std::size_t> seen;
  for (std::size_t epoch = 0; epoch < 8; ++epoch)
    for (const auto& [sample, n] : times_of(dropped, epoch)) seen.insert(sample);
  EXPECT_EQ(seen.size(), 7u);
  // The first epoch need not be epoch 0.
  const auto later = dealt(3, 100, {.seed = 5, .epoch = 2}, 1);
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(later[rank][0], all[rank][2]);
}

TEST(RankSampler, OrderDoesNotDependOnTheNumberOfRanks) {
  const Samples alone = dealt(1, 60, {.seed = 9}, 1)[0][0];
  const auto all = dealt(4, 60, {.seed = 9}, 1);
  for (std::size_t position = 0; position < 60; ++position)
    EXPECT_EQ(all[position % 4][0][position / 4], alone[position]);
}

TEST(RankSampler, UnshuffledSamplesKeepTheDatasetsOrder) {
  const auto all = dealt(2, 5, {.shuffle = false}, 2);
  for (std::size_t epoch : {0, 1}) {
    EXPECT_EQ(all[0][epoch], (Samples{0, 2, 4}));
    EXPECT_EQ(all[1][epoch], (Samples{1, 3, 0}));
  }
}

TEST(RankSampler, LoadedStateGoesOnAndResetTakesAnotherSize) {
  on_each_rank(2, [](const Mesh& mesh) {
    RankSampler sampler(40, mesh, {.seed = 3});
    sampler.reset();
    sampler.reset();
    sampler.next(7);
    std::stringstream file;
    torch::serialize::OutputArchive saved;
    sampler.save(saved);
    saved.save_to(file);
    RankSampler other(40, mesh, {.seed = 3});
    torch::serialize::InputArchive loaded;
    loaded.load_from(file);
    other.load(loaded);
    EXPECT_EQ(other.epoch(), 1);
    EXPECT_EQ(rest_of_epoch(other), rest_of_epoch(sampler));
    other.reset();
    sampler.reset();
    EXPECT_EQ(rest_of_epoch(other), rest_of_epoch(sampler));
    RankSampler smaller(39, mesh);
    EXPECT_THROW(smaller.load(loaded), Error);
    sampler.reset(11);
    EXPECT_EQ(rest_of_epoch(sampler).size(), 6u);
  });
}

TEST(RankSampler, TooFewSamplesAreRefused) {
  on_each_rank(3, [](const Mesh& mesh) {
    EXPECT_THROW(RankSampler(0, mesh), Error);
    EXPECT_THROW(RankSampler(2, mesh, {.tail = Tail::kDrop}), Error);
    RankSampler sampler(3, mesh);
    EXPECT_THROW(sampler.reset(0), Error);
  });
}

/// A dataset in which sample i is i.
struct Numbers : torch::data::datasets::Dataset<Numbers, std::size_t> {
  explicit Numbers(std::size_t count_given) : count(count_given) {}
  std::size_t get(std::size_t index) override { return index; }
  std::optional<std::size_t> size() const override { return count; }
  std::size_t count;
};

TEST(RankSampler, DataLoaderGivesTheSamplersOrder) {
  for (const std::size_t workers : {0, 2}) {
    const auto wanted = dealt(2, 21, {.seed = 4}, 3);
    on_each_rank(2, [&](const Mesh& mesh) {
      auto loader = torch::data::make_data_loader(Numbers(21), RankSampler(21, mesh, {.seed = 4}),
                                                  torch::data::DataLoaderOptions(4).workers(workers));
      for (std::size_t epoch = 0; epoch < 3; ++epoch) {
        Samples got;
        std::vector<std::size_t> sizes;
        for (const auto& batch : *loader) {
          got.insert(got.end(), batch.begin(), batch.end());
          sizes.push_back(batch.size());
        }
        EXPECT_EQ(got, wanted[mesh.rank()][epoch]) << epoch;
        EXPECT_EQ(sizes, (std::vector<std::size_t>{4, 4, 3}));
      }
    });
  }
}

/// Returns the samples that a loader with batches of 2 gives with `sampler`, epoch by epoch.
std::vector<Samples> epochs_of(const RankSampler& sampler, std::size_t count, int epochs, std::size_t workers) {
  auto loader =
      torch::data::make_data_loader(Numbers(count), sampler, torch::data::DataLoaderOptions(2).workers(workers));
  std::vector<Samples> all;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    all.emplace_back();
    for (const auto& batch : *loader) all.back().insert(all.back().end(), batch.begin(), batch.end());
  }
  return all;
}

TEST(RankSampler, DataLoaderGoesOnInTheMiddleOfAnEpoch) {
  for (const std::size_t workers : {0, 2}) {
    on_each_rank(2, [&](const Mesh& mesh) {
      const RankSamplerOptions options{.seed = 4};
      const std::vector<Samples> whole = epochs_of(RankSampler(21, mesh, options), 21, 3, workers);
      for (const std::size_t taken : {0, 4, 10, 11}) {  // an epoch has 11 samples
        RankSampler place(21, mesh, options);
        place.reset();
        place.reset();
        place.next(taken);
        // The run continues with the rest of epoch 1, or with epoch 2 if epoch 1 has no samples left.
        const Samples left(whole[1].begin() + static_cast<long>(taken), whole[1].end());
        const std::vector<Samples> wanted =
            left.empty() ? std::vector<Samples>{whole[2]} : std::vector<Samples>{left, whole[2]};
        RankSampler loaded(21, mesh, options), resumed(21, mesh, options);
        torch::serialize::OutputArchive saved;
        place.save(saved);
        std::stringstream file;
        saved.save_to(file);
        torch::serialize::InputArchive archive;
        archive.load_from(file);
        loaded.load(archive);
        resumed.resume(place.cursor());
        const auto epochs = static_cast<int>(wanted.size());
        EXPECT_EQ(epochs_of(loaded, 21, epochs, workers), wanted) << taken;
        EXPECT_EQ(epochs_of(resumed, 21, epochs, workers), wanted) << taken;
        EXPECT_EQ(resumed.epoch(), left.empty() ? 2 : 1);
        // The program's own copy of the sampler also counts the samples that were taken.
        EXPECT_EQ(rest_of_epoch(resumed, 2), wanted[0]);
        EXPECT_EQ(resumed.cursor(), (SamplerCursor{left.empty() ? 3 : 2, 0, 21, 4, true}));
      }
    });
  }
}

TEST(RankSampler, LoadedStateGoesOnWithAnotherNumberOfRanks) {
  SamplerCursor cursor;
  Samples seen, order;
  on_each_rank(1, [&](const Mesh& mesh) {
    RankSampler alone(21, mesh, {.seed = 4});
    order = rest_of_epoch(alone);
  });
  on_each_rank(2, [&](const Mesh& mesh) {
    RankSampler sampler(21, mesh, {.seed = 4});
    sampler.next(5);
    if (mesh.rank() == 0) cursor = sampler.cursor();
  });
  EXPECT_EQ(cursor.consumed, 10);
  std::vector<Samples> got(3);
  on_each_rank(3, [&](const Mesh& mesh) {
    RankSampler sampler(21, mesh, {.seed = 4});
    sampler.resume(cursor);
    got[static_cast<std::size_t>(mesh.rank())] = rest_of_epoch(sampler);
    for (const SamplerCursor& other : {SamplerCursor{0, 10, 22, 4, true}, SamplerCursor{0, 10, 21, 5, true}}) {
      try {
        sampler.resume(other);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      }
    }
  });
  for (std::size_t i = 10; i < 21; ++i) EXPECT_EQ(got[(i - 10) % 3][(i - 10) / 3], order[i]) << i;
}

/// Loaders with workers take samples before the program uses them.
TEST(RankSampler, EvaluationCountsEachSampleOnceOnAnyNumberOfRanks) {
  constexpr std::size_t kSamples = 25;
  const Batch all = make_batches(1, kSamples, 5, TinyOptions().vocab)[0];
  Tiny plain = make_tiny({}, false);
  const double wanted = plain->forward(all.tokens, all.targets).item<double>();
  for (const int ranks : {1, 2, 3}) {
    for (const std::size_t batch : {3, 4, 8}) {  // 24 samples fill whole batches of 8 on three ranks
      on_each_rank(ranks, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
        auto loader = torch::data::make_data_loader(Numbers(kSamples), RankSampler(kSamples, mesh, {.seed = 4}),
                                                    torch::data::DataLoaderOptions(batch).workers(batch == 4 ? 2 : 0));
        const auto found = session.engine.evaluate(*loader, [&](const Samples& samples) {
          const at::Tensor rows = at::tensor(std::vector<std::int64_t>(samples.begin(), samples.end()));
          const at::Tensor loss =
              session.model->forward(all.tokens.index_select(0, rows), all.targets.index_select(0, rows));
          return WeightedLoss{loss, static_cast<double>(samples.size())};
        });
        EXPECT_NEAR(found.loss, wanted, 1e-6 * wanted) << ranks << " ranks, batches of " << batch;
        EXPECT_EQ(found.weight, kSamples);
        std::size_t of_epoch = 0;  // samples of this rank in the next epoch, which is padded again
        for (const auto& samples : *loader) of_epoch += samples.size();
        EXPECT_EQ(of_epoch, (kSamples + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks));
        std::size_t once = 0;
        for (const auto& samples : uneven(loader, session.engine)) {
          once += samples.size();
          session.engine.backward(session.loss(0));
          session.engine.step();
        }
        EXPECT_EQ(all_reduce(mesh, static_cast<double>(once), Reduce::kSum), kSamples);
      });
    }
  }
}

constexpr std::size_t kOfSteps = 50;  // samples
constexpr RankSamplerOptions kDealt{.seed = 4, .microbatches = 6, .batch = 2};

/// Returns this rank's run of a step's six microbatches. The runs of even steps have equal lengths. The borders between
/// runs lie one microbatch later in odd steps.
MicrobatchRun run_of(std::size_t step, int rank, int ranks) {
  const auto begin = [&](std::int64_t of) {
    return of == 0 || of == ranks ? of * 6 / ranks : of * 6 / ranks + static_cast<std::int64_t>(step % 2);
  };
  return {begin(rank), begin(rank + 1)};
}

/// Returns the samples that loaders give to the microbatches of two epochs: [step][microbatch].
std::vector<std::vector<Samples>> steps_of(int ranks, const RankSamplerOptions& options) {
  const std::size_t of_epoch = options.tail == Tail::kPad ? 5 : 4;
  std::vector<std::vector<Samples>> steps(2 * of_epoch, std::vector<Samples>(6));
  on_each_rank(ranks, [&](const Mesh& mesh) {
    RankSampler place(kOfSteps, mesh, options);
    auto loader = torch::data::make_data_loader(Numbers(kOfSteps), place, torch::data::DataLoaderOptions(2));
    std::size_t step = 0;
    MicrobatchRun run = run_of(step, mesh.rank(), ranks);
    std::int64_t next = run.begin;
    for (const std::int64_t epoch : {0, 1}) {
      EXPECT_EQ(place.size(), of_epoch * 2 * static_cast<std::size_t>(run.end - run.begin));
      for (const auto& batch : *loader) {
        EXPECT_EQ(place.epoch(), epoch);
        steps.at(step).at(static_cast<std::size_t>(next)) = batch;
        if (++next < run.end) continue;
        run = run_of(++step, mesh.rank(), ranks);
        next = run.begin;
        place.deal(run);
        const std::size_t taken = step % of_epoch * 12;
        EXPECT_EQ(place.cursor(), (SamplerCursor{static_cast<std::int64_t>(step / of_epoch),
                                                 static_cast<std::int64_t>(taken), kOfSteps, 4, options.shuffle}));
      }
    }
    EXPECT_EQ(step, 2 * of_epoch);
  });
  return steps;
}

TEST(RankSampler, DealtMicrobatchesHoldTheSameOnAnyNumberOfRanks) {
  for (const Tail tail : {Tail::kPad, Tail::kDrop}) {
    RankSamplerOptions options = kDealt;
    options.tail = tail;
    const auto alone = steps_of(1, options);
    EXPECT_NE(alone[0], alone[alone.size() / 2]) << "another epoch";
    for (const int ranks : {2, 3}) EXPECT_EQ(steps_of(ranks, options), alone) << ranks;
    std::map<std::size_t, int> times;
    for (std::size_t step = 0; step < alone.size() / 2; ++step)
      for (const Samples& microbatch : alone[step])
        for (const std::size_t sample : microbatch) ++times[sample];
    EXPECT_EQ(times.size(), tail == Tail::kPad ? 50u : 48u);
    options.shuffle = false;
    const auto straight = steps_of(2, options);
    EXPECT_EQ(straight[1][2], (Samples{16, 17}));
    if (tail == Tail::kDrop) continue;
    EXPECT_EQ(straight[4][1], (Samples{0, 1})) << "the last step is filled up";
  }
}

TEST(RankSampler, DealtMicrobatchesGoOnWithOtherRanksAndByTheirNumbers) {
  const auto wanted = steps_of(1, kDealt);
  SamplerCursor cursor;
  std::stringstream file;
  on_each_rank(2, [&](const Mesh& mesh) {
    RankSampler sampler(kOfSteps, mesh, kDealt);
    for (int i = 0; i < 6; ++i) sampler.next(2);
    if (mesh.rank() != 0) return;
    cursor = sampler.cursor();
    torch::serialize::OutputArchive saved;
    sampler.save(saved);
    saved.save_to(file);
  });
  EXPECT_EQ(cursor.consumed, 24);
  on_each_rank(3, [&](const Mesh& mesh) {
    RankSampler sampler(kOfSteps, mesh, kDealt);
    sampler.resume(cursor);
    sampler.reset();
    for (std::size_t round = 0; round < 2; ++round)
      EXPECT_EQ(*sampler.next(2), wanted[2][2 * static_cast<std::size_t>(mesh.rank()) + round]);
  });
  on_each_rank(2, [&](const Mesh& mesh) {
    RankSampler sampler(kOfSteps, mesh, kDealt);
    if (mesh.rank() == 0) {
      torch::serialize::InputArchive loaded;
      loaded.load_from(file);
      sampler.load(loaded);
    } else {
      sampler.resume(cursor);
    }
    for (std::size_t step = 2; step < wanted.size(); ++step) {
      for (const std::size_t microbatch : {4, 0, 5})
        EXPECT_EQ(sampler.of(static_cast<std::int64_t>(microbatch)), wanted[step][microbatch]) << step;
      sampler.end_step();
    }
    // An evaluation does not change the position in the data from which training continues.
    {
      const UnpaddedEpoch unpadded;
      sampler.reset();
    }
    EXPECT_EQ(rest_of_epoch(sampler, 7).size(), kOfSteps / 2);
    EXPECT_EQ(sampler.cursor(), (SamplerCursor{2, 0, kOfSteps, 4, true}));
  });
}

TEST(RankSampler, DealtMicrobatchesThatNobodyAskedForAreRefused) {
  on_each_rank(2, [](const Mesh& mesh) {
    RankSampler sampler(kOfSteps, mesh, kDealt);
    EXPECT_THAT(error_of([&] { sampler.next(3); }), HasSubstr("was asked for 3"));
    EXPECT_THAT(error_of([&] { sampler.deal({4, 7}); }), HasSubstr("the sampler's microbatches"));
    EXPECT_THAT(error_of([&] { sampler.of(6); }), HasSubstr("a step has 0 to 5"));
    RankSampler plain(kOfSteps, mesh);
    EXPECT_THAT(error_of([&] { plain.deal({0, 3}); }), HasSubstr("deals samples one by one"));
    EXPECT_THAT(error_of([&] { RankSampler(kOfSteps, mesh, {.batch = 2}); }), HasSubstr("was given 0"));
    EXPECT_THAT(error_of([&] { RankSampler(kOfSteps, mesh, {.microbatches = 6}); }), HasSubstr("at least 1"));
    EXPECT_THAT(error_of([&] { RankSampler(7, mesh, {.tail = Tail::kDrop, .microbatches = 6, .batch = 2}); }),
                HasSubstr("fewer than one step's"));
    auto ahead =
        torch::data::make_data_loader(Numbers(kOfSteps), sampler, torch::data::DataLoaderOptions(2).workers(2));
    int given = 0;
    for (const auto& batch : *ahead) {
      EXPECT_EQ(batch.size(), 2u);
      if (++given == 3) break;
    }
    EXPECT_THAT(error_of([&] { sampler.deal({0, 3}); }), HasSubstr("without workers"));
  });
}

// The loop takes the first microbatch of a third step and then ends. A step has one microbatch of each rank here.
TEST(RankSampler, EpochThatIsBrokenOffLeavesTheNextOneToBeDealt) {
  on_each_rank(2, [](const Mesh& mesh) {
    RankSampler sampler(kOfSteps, mesh, {.seed = 4, .microbatches = 2, .batch = 2});
    const MicrobatchRun run{mesh.rank(), mesh.rank() + 1};
    for (int epoch = 0; epoch < 2; ++epoch) {
      sampler.reset();
      for (int step = 0; step < 2; ++step) {
        sampler.next(2);
        sampler.deal(run);
      }
      sampler.next(2);
    }
    EXPECT_EQ(sampler.cursor(), (SamplerCursor{1, 12, kOfSteps, 4, true}));
  });
}

TEST(RankSampler, DealtMicrobatchesGoOnBehindSamplesThatWereDealtOneByOne) {
  on_each_rank(2, [](const Mesh& mesh) {
    RankSampler single(kOfSteps, mesh, {.seed = 4});
    single.next(6);
    torch::serialize::OutputArchive saved;
    single.save(saved);
    std::stringstream file;
    saved.save_to(file);
    torch::serialize::InputArchive loaded;
    loaded.load_from(file);
    RankSampler sampler(kOfSteps, mesh, kDealt);
    sampler.load(loaded);
    EXPECT_EQ(sampler.cursor(), (SamplerCursor{0, 12, kOfSteps, 4, true}));
  });
}

// Rank 1 is slow, so rank 0 gets more microbatches.
TEST(RankSampler, SamplesDealtBySpeedTrainToTheBitsOfOneRank) {
  const Batch all = make_batches(1, kOfSteps, 5, TinyOptions().vocab)[0];
  const auto trained_on = [&](int ranks) {
    std::vector<Values> values(static_cast<std::size_t>(ranks));
    std::vector<std::int64_t> most(values.size());
    on_each_rank(ranks, [&](const Mesh& mesh) {
      at::set_num_threads(1);
      Session session(mesh, strategy_for(ShardingStrategy::kShardGradients, [&](Strategy& strategy) {
                        strategy.reproducible = true;
                        strategy.gradient_accumulation = 6 / ranks;
                        strategy.gradient_sync = GradientSync::kLastMicrobatch;
                        strategy.deal = {.by = DealBy::kSpeed, .window = 1};
                      }));
      const auto rank = static_cast<std::size_t>(mesh.rank());
      RankSampler place(kOfSteps, mesh, kDealt);
      auto loader = torch::data::make_data_loader(Numbers(kOfSteps), place, torch::data::DataLoaderOptions(2));
      for (const auto& samples : *loader) {
        const at::Tensor rows = at::tensor(std::vector<std::int64_t>(samples.begin(), samples.end()));
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 40 : 4));
        session.engine.backward(
            session.model->forward(all.tokens.index_select(0, rows), all.targets.index_select(0, rows)));
        if (!session.engine.step_is_due()) continue;
        session.engine.step();
        const MicrobatchRun run = session.engine.microbatches();
        most[rank] = std::max(most[rank], run.end - run.begin);
        place.deal(run);
      }
      values[rank] = session.values();
    });
    EXPECT_TRUE(ranks == 1 || most[0] > most[1]);
    return values;
  };
  const std::vector<Values> alone = trained_on(1), dealt = trained_on(2);
  for (const Values& each : dealt) EXPECT_TRUE(all_same_bits(each, alone[0]));
}

TEST(SeedForRank, LowBitsOfSeedsDifferBetweenRanks) {
  EXPECT_EQ(seed_for_rank(0, 0), 0u);  // users rely on this rule
  EXPECT_EQ(seed_for_rank(1, 2), 0x5692161d100b05e5u + 2);
  for (const std::uint64_t seed : {0u, 1u, 2u, 42u}) {
    std::set<std::uint32_t> low;
    for (int rank = 0; rank < 1000; ++rank) low.insert(static_cast<std::uint32_t>(seed_for_rank(seed, rank)));
    EXPECT_EQ(low.size(), 1000u);
  }
  EXPECT_NE(seed_for_rank(1, 1), seed_for_rank(2, 0));
}

/// Returns the function from which a StepSampler takes the steps 0, 1, ... below `steps`.
StepSampler::TakeStep steps_below(std::int64_t steps) {
  return [steps, next = std::int64_t{0}]() mutable { return next < steps ? std::optional(next++) : std::nullopt; };
}

TEST(StepSampler, EachStepHasSamplesOfItsOwnAndAnEpochHasEachOnce) {
  for (const Tail tail : {Tail::kPad, Tail::kDrop}) {
    const std::int64_t of_epoch = tail == Tail::kPad ? 4 : 3;  // steps of 2 batches of 3 samples
    StepSampler sampler(23, /*batches=*/2, steps_below(2 * of_epoch), {.seed = 1, .tail = tail});
    std::vector<Samples> epochs(2);
    for (Samples& epoch : epochs) {
      for (std::int64_t batch = 0; batch < 2 * of_epoch; ++batch) {
        const auto samples = sampler.next(3);
        ASSERT_TRUE(samples.has_value());
        EXPECT_EQ(samples->size(), 3u);
        epoch.insert(epoch.end(), samples->begin(), samples->end());
      }
      const std::set<std::size_t> different(epoch.begin(), epoch.end());
      EXPECT_EQ(different.size(), tail == Tail::kPad ? 23u : 18u);
    }
    EXPECT_FALSE(sampler.next(3).has_value());
    EXPECT_NE(epochs[0], epochs[1]);
    StepSampler late(23, 2, [] { return std::optional<std::int64_t>(5); }, {.seed = 1, .tail = tail});
    const auto wanted = epochs[1].begin() + 6 * (5 - of_epoch);
    EXPECT_EQ(late.next(3), std::optional(Samples(wanted, wanted + 3))) << "whoever makes step 5";
  }
}

TEST(StepSampler, IterationThatBeginsAnewGoesOnWithTheNextStep) {
  StepSampler sampler(8, /*batches=*/1, steps_below(3), {.shuffle = false});
  EXPECT_EQ(sampler.next(2), std::optional(Samples{0, 1}));
  sampler.reset();
  EXPECT_EQ(sampler.next(2), std::optional(Samples{2, 3})) << "a new iteration goes on";
  sampler.reset(6);
  EXPECT_EQ(sampler.next(2), std::optional(Samples{4, 5}));
  EXPECT_FALSE(sampler.next(2).has_value());
}

TEST(StepSampler, NumbersWithoutAStepAreRefused) {
  EXPECT_NE(usage_error_of([] { StepSampler(0, 1, steps_below(1)); }).find("a sample or more"), std::string::npos);
  EXPECT_NE(usage_error_of([] { StepSampler(5, 0, steps_below(1)); }).find("a batch or more"), std::string::npos);
  StepSampler sampler(5, 2, steps_below(1), {.tail = Tail::kDrop});
  EXPECT_NE(error_of([&] { sampler.next(3); }).find("fewer than one step's 6"), std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
