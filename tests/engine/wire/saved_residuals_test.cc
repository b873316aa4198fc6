// Tests that checkpoints hold the residuals of compressed gradients. Ranks are processes that Gloo joins.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tests/engine/wire/gradient_methods.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace saved_residuals_test {

Adjust with_feedback(WireForm form) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression = {.gradients = form, .error_feedback = true};
  };
}

struct Kind {
  const char* name;
  int ranks, hosts;
  ShardingStrategy strategy;
  Adjust adjust;
};

const Kind kKinds[] = {
    {"PowerSGD", 2, 2, ShardingStrategy::kNoShard, power_sgd(2)},
    {"top-k", 2, 2, ShardingStrategy::kShardGradients, top_k(0.1)},
    {"top-k with momentum", 2, 2, ShardingStrategy::kNoShard, top_k(0.1, 0.5)},
    {"random-k", 2, 2, ShardingStrategy::kShardOptimizer, random_k(0.1)},
    {"signs", 2, 2, ShardingStrategy::kNoShard, with_method(SignFeedbackConfig())},
    {"one bit", 3, 3, ShardingStrategy::kShardGradients, one_bit()},
    {"one bit of momentum", 2, 2, ShardingStrategy::kNoShard, one_bit_of_momentum},
    {"one bit, restored", 2, 2, ShardingStrategy::kNoShard,
     [](Strategy& s) {
       one_bit()(s);
       s.compression.restore_skipped = true;
     }},
    {"int4", 3, 3, ShardingStrategy::kFullShard, with_feedback(WireForm::kInt4)},
    {"int4, whole sums", 2, 2, ShardingStrategy::kNoShard, with_feedback(WireForm::kInt4)},
    {"int4 between hosts", 4, 2, ShardingStrategy::kFullShard, with_feedback(WireForm::kInt4)},
    {"int4 between hosts, whole sums", 4, 2, ShardingStrategy::kNoShard, with_feedback(WireForm::kInt4)},
    {"int8 between replicas", 4, 2, ShardingStrategy::kHybridShard, with_feedback(WireForm::kInt8)}};

/// Numbers of ranks and hosts. Kinds with the same numbers of ranks and hosts run one after the other in the same
/// processes.
constexpr std::pair<int, int> kWorlds[] = {{2, 2}, {3, 3}, {4, 2}};
bool runs_on(const Kind& kind, const std::pair<int, int>& world) {
  return kind.ranks == world.first && kind.hosts == world.second;
}

constexpr std::size_t kSavedAt = 3, kEnd = 6;

void train(Session& session, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) session.train(i);
}

// The same ranks continue with the same bits. The bits would differ without the saved residuals.
TEST(SavedResiduals, SameRanksResumeWithTheSameBits) {
  for (const Kind& kind : kKinds) {
    const auto runs = std::ranges::count_if(kWorlds, [&](const auto& world) { return runs_on(kind, world); });
    ASSERT_EQ(runs, 1) << kind.name;
  }
  const TestFolder folder;
  // The flag of a case says whether training continues while the checkpoint is saved.
  const auto cases = pairwise_of<1>(kKinds, std::array{false, true});
  for (const std::pair<int, int>& world : kWorlds) {
    on_hosts(world.first, world.second, [&](const Mesh& mesh) {
      for (const auto& each : cases) {
        const Kind& kind = std::get<0>(each);
        const bool beside = std::get<1>(each);
        if (!runs_on(kind, world)) continue;
        const std::string what = std::string(kind.name) + (beside ? ", saved beside training" : "");
        const std::string saved = (folder / what).string();
        const Strategy strategy = strategy_for(kind.strategy, [&](Strategy& s) {
          kind.adjust(s);
          s.checkpoint.async = beside;
        });
        Session first(mesh, strategy);
        train(first, 0, kSavedAt);
        save_checkpoint(first.engine, saved);
        train(first, kSavedAt, kEnd);
        finish_checkpoint(first.engine);
        Session second(mesh, strategy), without(mesh, strategy);
        const LoadedCheckpoint loaded = load_checkpoint(second.engine, saved);
        require(loaded.inexact.empty(), what + ": " + (loaded.inexact.empty() ? "" : loaded.inexact[0]));
        train(second, kSavedAt, kEnd);
        require(all_same_bits(second.values(), first.values()), what + " goes on with other bits");
        load_checkpoint(without.engine, saved);
        without.engine.set_trainable("blocks.0.*", false);
        without.engine.set_trainable("blocks.0.*", true);
        train(without, kSavedAt, kEnd);
        require(!all_same_bits(without.values(), first.values()), what + " kept nothing");
      }
    });
  }
}

bool is_told(const LoadedCheckpoint& loaded, const std::string& text) {
  return std::ranges::any_of(loaded.inexact, [&](const std::string& line) { return line.find(text) != line.npos; });
}

/// Returns the change that all residuals of a checkpoint together make in each element of the mean gradient, by the
/// parameter's name.
std::map<std::string, std::vector<double>> residuals_of(const std::string& path) {
  const auto checkpoint = SavedCheckpoint::open(path, "test");
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  const Manifest& manifest = (*checkpoint)->manifest();
  EXPECT_TRUE(manifest.residuals);
  std::map<std::string, std::vector<double>> sums;
  for (const SavedParameter& parameter : manifest.parameters) {
    std::vector<double>& sum = sums[parameter.name];
    sum.resize(static_cast<std::size_t>(parameter.numel));
    for (std::int64_t rank = 0; rank < manifest.ranks; ++rank) {
      for (const char* const what : {kResidual, kReplicaResidual, kSumResidual}) {
        for (const auto& place : (*checkpoint)->pieces(of_rank(what, rank), parameter.name)) {
          std::vector<float> values(static_cast<std::size_t>(place.piece.numel));
          const absl::Status read = (*checkpoint)
                                        ->read(of_rank(what, rank), parameter.name, place.piece.offset,
                                               std::as_writable_bytes(std::span(values)));
          EXPECT_TRUE(read.ok()) << read;
          const double parts = static_cast<double>(manifest.ranks * manifest.residuals->microbatches) *
                               (1 - manifest.residuals->momentum);
          for (std::size_t i = 0; i < values.size(); ++i)
            sum[static_cast<std::size_t>(place.piece.offset) + i] += values[i] / parts;
        }
      }
    }
  }
  return sums;
}

// The residuals change the next mean gradient by the same amount on the ranks that load as on the ranks that saved.
// Short tests load the checkpoint of each kind under three kinds, including its own kind. Any two kinds have a kind
// that loads the checkpoints of both.
TEST(SavedResiduals, OtherRanksGetTheMeanOfResiduals) {
  const Kind kOthers[] = {{"two", 2, 2, ShardingStrategy::kShardGradients, with_feedback(WireForm::kInt8)},
                          {"three", 3, 3, ShardingStrategy::kFullShard, with_feedback(WireForm::kInt8)},
                          {"top-k", 2, 2, ShardingStrategy::kNoShard, top_k(0.2)},
                          {"one bit", 3, 3, ShardingStrategy::kNoShard, one_bit()},
                          {"one bit of momentum", 2, 2, ShardingStrategy::kNoShard, one_bit_of_momentum},
                          {"between hosts", 4, 2, ShardingStrategy::kFullShard, with_feedback(WireForm::kInt4)},
                          {"between replicas", 4, 2, ShardingStrategy::kHybridShard, with_feedback(WireForm::kInt8)}};
  const TestFolder folder;
  const auto saved_by = [&](const Kind& from) { return (folder / from.name).string(); };
  const auto saved_again = [&](const Kind& from, const Kind& to) { return saved_by(from) + " as " + to.name; };
  const auto goes_to = [&](const Kind& from, const Kind& to) {
    const std::ptrdiff_t apart = (&to - &from + std::ssize(kOthers)) % std::ssize(kOthers);
    return tests_are_long() || apart == 0 || apart == 1 || apart == 3;
  };
  for (const std::pair<int, int>& world : kWorlds) {
    on_hosts(world.first, world.second, [&](const Mesh& mesh) {
      for (const Kind& from : kOthers) {
        if (!runs_on(from, world)) continue;
        Session session(mesh, strategy_for(from.strategy, [&](Strategy& s) {
                          from.adjust(s);
                          s.optimizer.momentum = kMomentum;  // runs of all kinds have the same states
                        }));
        train(session, 0, kSavedAt);
        save_checkpoint(session.engine, saved_by(from));
      }
    });
  }
  for (const std::pair<int, int>& world : kWorlds) {
    on_hosts(world.first, world.second, [&](const Mesh& mesh) {
      for (const Kind& from : kOthers) {
        for (const Kind& to : kOthers) {
          if (!runs_on(to, world) || !goes_to(from, to)) continue;
          Session session(mesh, strategy_for(to.strategy, [&](Strategy& s) {
                            to.adjust(s);
                            s.optimizer.momentum = kMomentum;
                            s.gradient_accumulation = 2;
                          }));
          const LoadedCheckpoint loaded = load_checkpoint(session.engine, saved_by(from));
          require(is_told(loaded, "the mean of what"), "the mean is told");
          save_checkpoint(session.engine, saved_again(from, to));
          session.train(kSavedAt);
        }
      }
    });
  }
  for (const Kind& from : kOthers) {
    const auto wanted = residuals_of(*find_checkpoint(saved_by(from), "test"));
    for (const Kind& to : kOthers) {
      if (!goes_to(from, to)) continue;
      const auto got = residuals_of(*find_checkpoint(saved_again(from, to), "test"));
      double size = 0;
      for (const auto& [name, values] : wanted) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          size += std::abs(values[i]);
          // Sums and shares are rounded to fp32.
          ASSERT_NEAR(got.at(name)[i], values[i], 1e-6 * std::abs(values[i]) + 1e-9)
              << from.name << " -> " << to.name << ": " << name << " " << i;
        }
      }
      EXPECT_GT(size, 0) << from.name;
    }
  }
}

// A commit holds the residuals too, and it is written while the next forward runs.
TEST(SavedResiduals, SameRanksResumeFromACommitWithTheSameBits) {
  const TestFolder folder;
  for (const Kind& kind : kKinds) std::filesystem::create_directory(folder / kind.name);
  for (const std::pair<int, int>& world : kWorlds) {
    on_hosts(world.first, world.second, [&](const Mesh& mesh) {
      for (const Kind& kind : kKinds) {
        if (!runs_on(kind, world)) continue;
        const Strategy strategy = strategy_for(kind.strategy, kind.adjust);
        Strategy durable = strategy;
        durable.durable = {.every = 1, .dir = (folder / kind.name).string()};
        const Values wanted = trained(mesh, strategy, kEnd);
        const auto go_on = [&](std::size_t begin, std::size_t end) {
          Session session(mesh, durable);
          const std::optional<LoadedCheckpoint> resumed = resume_durable(session.engine);
          require(resumed.has_value() == (begin > 0), "there is a commit");
          require(session.engine.plan().use == session.engine.allocated(), "what is allocated is the plan");
          for (std::size_t i = begin; i < end; ++i) {
            session.train(i);
            commit_durable(session.engine);
          }
          return session.values();
        };
        go_on(0, kSavedAt);
        require(all_same_bits(go_on(kSavedAt, kEnd), wanted), std::string(kind.name) + " goes on with other bits");
      }
    });
  }
}

/// Returns all values of the kind `word` that a checkpoint has for a parameter.
std::vector<float> saved_values(SavedCheckpoint& checkpoint, const std::string& word, const SavedParameter& parameter) {
  std::vector<float> values(static_cast<std::size_t>(parameter.numel));
  const absl::Status read = checkpoint.read(word, parameter.name, 0, std::as_writable_bytes(std::span(values)));
  EXPECT_TRUE(read.ok()) << read;
  return values;
}

// The optimizer's momentum is the momentum that ranks sent, so the rounding of a single gradient leaves no permanent
// error in it. This also holds after other ranks have loaded the momentum.
TEST(SavedResiduals, OptimizersMomentumIsTheMomentumRanksSent) {
  const TestFolder one, two;
  const auto strategy_of = [](std::int64_t microbatches) {
    return strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
      one_bit_of_momentum(s);
      s.gradient_accumulation = microbatches;
    });
  };
  on_hosts(3, 3, [&](const Mesh& mesh) {
    Session session(mesh, strategy_of(1));
    train(session, 0, kSavedAt);
    save_checkpoint(session.engine, one.path());
  });
  on_hosts(2, 2, [&](const Mesh& mesh) {
    Session session(mesh, strategy_of(2));
    load_checkpoint(session.engine, one.path());
    save_checkpoint(session.engine, two.path());
  });
  const struct {
    const TestFolder* folder;
    double microbatches;
  } saved[] = {{&one, 1}, {&two, 2}};
  for (const auto& [folder, microbatches] : saved) {
    const auto checkpoint = SavedCheckpoint::open(*find_checkpoint(folder->path(), "test"), "test");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    double largest = 0;
    for (const SavedParameter& parameter : (*checkpoint)->manifest().parameters) {
      const std::vector<float> of_optimizer = saved_values(**checkpoint, "momentum_buffer", parameter),
                               sent = saved_values(**checkpoint, of_rank(kGradientMomentum, 0), parameter);
      for (std::size_t i = 0; i < sent.size(); ++i) {
        const double wanted = sent[i] / (1 - kMomentum) / microbatches;
        largest = std::max(largest, std::abs(wanted));
        ASSERT_NEAR(of_optimizer[i], wanted, 1e-5) << parameter.name << " " << i;
      }
    }
    EXPECT_GT(largest, 1e-3);
  }
}

// The first moments that 1-bit Adam has after its warm-up decay, and the values that ranks sent are added to them.
TEST(SavedResiduals, OneBitAdamsFirstMomentsAddWhatRanksSent) {
  constexpr double kBeta = 0.75;
  constexpr std::size_t kPlain = 2, kSteps = 5;
  const TestFolder before, after;
  on_hosts(2, 2, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
                      descend(s);
                      s.optimizer = {.type = OptimizerType::kAdamW, .lr = 1e-3, .beta1 = kBeta, .freeze_step = kPlain};
                      s.compression = {.method = OneBitConfig{.momentum = kBeta}, .start_step = kPlain};
                    }));
    train(session, 0, kPlain);
    save_checkpoint(session.engine, before.path());
    train(session, kPlain, kSteps);
    save_checkpoint(session.engine, after.path());
  });
  const auto first = SavedCheckpoint::open(*find_checkpoint(before.path(), "test"), "test"),
             second = SavedCheckpoint::open(*find_checkpoint(after.path(), "test"), "test");
  ASSERT_TRUE(first.ok() && second.ok());
  const double decay = std::pow(kBeta, kSteps - kPlain);
  double largest = 0;
  for (const SavedParameter& parameter : (*first)->manifest().parameters) {
    const std::vector<float> warm = saved_values(**first, "exp_avg", parameter),
                             moments = saved_values(**second, "exp_avg", parameter),
                             sent = saved_values(**second, of_rank(kGradientMomentum, 1), parameter);
    for (std::size_t i = 0; i < sent.size(); ++i) {
      largest = std::max(largest, static_cast<double>(std::abs(sent[i])));
      ASSERT_NEAR(moments[i], decay * warm[i] + sent[i], 1e-6) << parameter.name << " " << i;
    }
  }
  EXPECT_GT(largest, 1e-3);
}

TEST(SavedResiduals, MissingOrUnusedResidualsAreReported) {
  const TestFolder plain, compressed;
  on_hosts(2, 2, [&](const Mesh& mesh) {
    Session without(mesh, strategy_for(ShardingStrategy::kNoShard, descend));
    Session with(mesh, strategy_for(ShardingStrategy::kNoShard, top_k(0.1)));
    train(with, 0, kSavedAt);
    save_checkpoint(without.engine, plain.path());
    save_checkpoint(with.engine, compressed.path());
    const LoadedCheckpoint less = load_checkpoint(with.engine, plain.path());
    require(is_told(less, "begins with zeros"), "zeros are told");
    Session fresh(mesh, strategy_for(ShardingStrategy::kNoShard, top_k(0.1)));
    load_checkpoint(fresh.engine, plain.path());
    train(with, kSavedAt, kEnd);
    train(fresh, kSavedAt, kEnd);
    require(all_same_bits(with.values(), fresh.values()), "what was kept before is gone");
    const LoadedCheckpoint more = load_checkpoint(without.engine, compressed.path());
    require(is_told(more, "was left out"), "what is left out is told");
  });
}

}  // namespace saved_residuals_test
}  // namespace tessera::testing
