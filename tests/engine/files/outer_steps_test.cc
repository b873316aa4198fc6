// Tests "sync": replicas train by themselves between outer steps, and are one model after each outer step.

#include "engine/step/outer_steps.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/optim/sgd.h>

#include <array>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "sharding/partition.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/weights.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/counted_collectives.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace outer_steps_test {

using ::testing::HasSubstr;

struct Shape {
  int replicas, shards;
  Placed placed;
  int ranks() const { return replicas * shards; }
};
const Shape kShapes[] = {{2, 1, ShardingStrategy::kNoShard},
                         {3, 1, ShardingStrategy::kNoShard},
                         {2, 2, ShardingStrategy::kNoShard},
                         {2, 2, ShardingStrategy::kShardOptimizer},
                         {2, 2, ShardingStrategy::kShardGradients},
                         {2, 2, ShardingStrategy::kHybridShard},
                         {2, 2, Placed(ShardingStrategy::kHybridShard, /*shared=*/true)}};

Strategy with_sync(const Shape& shape, SyncType type, std::int64_t every, const Adjust& adjust = nullptr,
                   DType dtype = DType::kF32) {
  Strategy strategy = strategy_for(shape.placed, adjust, dtype);
  strategy.mesh = {shape.replicas, shape.shards};
  strategy.sync.type = type;
  strategy.sync.every = every;
  if (type == SyncType::kStreamingDiloco) strategy.sync.fragments = 2;
  return strategy;
}

/// Sets SGD without clipping, since each replica would clip by its own norm.
void plain_sgd(Strategy& s) {
  s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0};
  s.gradient_clipping = 0;
}

std::string text_of(const Shape& shape, SyncType type) {
  return name_of(shape.placed) + ", " + std::to_string(shape.replicas) + "x" + std::to_string(shape.shards) +
         (type == SyncType::kStreamingDiloco ? ", streaming_diloco"
          : type == SyncType::kDiloco        ? ", diloco"
                                             : ", local_sgd");
}

/// Returns each rank's values after each of `steps` steps [rank][step].
std::vector<std::vector<Values>> values_of_steps(const Shape& shape, const Strategy& strategy, std::size_t steps) {
  std::vector<std::vector<Values>> values(static_cast<std::size_t>(shape.ranks()));
  run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    for (std::size_t i = 0; i < steps; ++i) {
      const StepResult result = session.train(i);
      if (i == 0) {  // in later steps, `values` has gathered more than the plan counts
        EXPECT_EQ(result.planned, result.allocated);
      }
      values[static_cast<std::size_t>(mesh.rank())].push_back(session.values());
    }
  });
  return values;
}

TEST(OuterSteps, ReplicasAgreeAfterEachAndDifferInBetween) {
  for (const auto& each : pairwise_of(kShapes, std::array{SyncType::kLocalSgd, SyncType::kDiloco},
                                      std::array{DType::kF32, DType::kBF16})) {
    const Shape& shape = std::get<0>(each);
    const SyncType type = std::get<1>(each);
    const DType dtype = std::get<2>(each);
    SCOPED_TRACE(text_of(shape, type));
    const auto values = values_of_steps(shape, with_sync(shape, type, 3, nullptr, dtype), 7);
    for (std::size_t step = 0; step < 7; ++step) {
      for (std::size_t rank = 1; rank < values.size(); ++rank) {
        const bool alike = (step + 1) % 3 == 0 || rank < static_cast<std::size_t>(shape.shards);
        EXPECT_EQ(all_same_bits(values[rank][step], values[0][step]), alike) << "rank " << rank << ", step " << step;
      }
    }
  }
}

TEST(OuterSteps, LocalSgdOfOneStepEqualsPlainTraining) {
  for (const Shape& shape : kShapes) {
    Strategy plain = strategy_for(shape.placed, plain_sgd);
    plain.mesh = {shape.replicas, shape.shards};
    const auto wanted = values_of_steps(shape, plain, 4);
    const auto got = values_of_steps(shape, with_sync(shape, SyncType::kLocalSgd, 1, plain_sgd), 4);
    expect_close(got[0][3], wanted[0][3], 1e-6, name_of(shape.placed));
  }
}

/// Trains replicas in plain LibTorch. Each replica trains on its rows. Then the outer optimizer makes a step, on all
/// parameters at once, or with streaming_diloco on one fragment at a time.
class Reference {
 public:
  Reference(int replicas, const Strategy& strategy) : replicas_(replicas), sync_(strategy.sync) {
    at::set_num_threads(1);
    for (int replica = 0; replica < replicas; ++replica) {
      models_.push_back(make_tiny({}, false));
      optimizers_.push_back(std::make_unique<torch::optim::SGD>(models_.back()->parameters(),
                                                                torch::optim::SGDOptions(0.1).momentum(0.9)));
    }
    std::map<std::string, std::int64_t> unit_of;
    for (const auto& unit : partition(*models_[0], strategy, 1)) {
      for (const auto& group : unit->groups) {
        for (const FlatParameter& parameter : group->parameters) unit_of[parameter.name] = unit->index;
      }
    }
    for (const auto& parameter : models_[0]->named_parameters()) {
      outer_.push_back(parameter.value().detach().clone());
      moved_.push_back(at::zeros_like(outer_.back()));
      fragment_.push_back(streams() ? unit_of.at(parameter.key()) % sync_.fragments : 0);
    }
    sent_.resize(outer_.size());
  }

  Values after(std::int64_t steps) {
    for (std::int64_t step = 1; step <= steps; ++step) {
      train(step - 1);
      const at::NoGradGuard no_grad;
      if (streams() && step == arrives_) apply(sync_.mix);
      const std::int64_t fragments = streams() ? sync_.fragments : 1;
      for (std::int64_t fragment = 0; fragment < fragments; ++fragment) {
        if (step % sync_.every != (fragment + 1) * sync_.every / fragments % sync_.every) continue;
        send(fragment);
        arrives_ = step + sync_.delay;
        if (!streams()) apply(0);
        if (streams() && sync_.delay == 0) apply(sync_.mix);
      }
    }
    return values_of(*models_[0]);
  }

 private:
  bool streams() const { return sync_.type == SyncType::kStreamingDiloco; }
  void train(std::int64_t i) {
    const Batch& batch = batches_[static_cast<std::size_t>(i) % batches_.size()];
    const std::int64_t rows = 24 / replicas_;
    for (int replica = 0; replica < replicas_; ++replica) {
      const auto r = static_cast<std::size_t>(replica);
      optimizers_[r]->zero_grad();
      models_[r]
          ->forward(batch.tokens.narrow(0, replica * rows, rows), batch.targets.narrow(0, replica * rows, rows))
          .backward();
      optimizers_[r]->step();
    }
  }
  void send(std::int64_t fragment) {
    for (std::size_t i = 0; i < outer_.size(); ++i) {
      if (fragment_[i] != fragment) continue;
      sent_[i] = outer_[i].clone();
      for (Tiny& model : models_) sent_[i] -= model->parameters()[i] / replicas_;
    }
  }
  void apply(double mix) {
    const double lr = sync_.outer.lr, momentum = sync_.outer.momentum;
    for (std::size_t i = 0; i < outer_.size(); ++i) {
      if (!sent_[i].defined()) continue;
      moved_[i] = momentum * moved_[i] + sent_[i];
      outer_[i] -= lr * (sent_[i] + momentum * moved_[i]);
      for (Tiny& model : models_) {
        at::Tensor own = model->parameters()[i];
        own.copy_(mix * own + (1 - mix) * outer_[i]);
      }
      sent_[i] = at::Tensor();
    }
  }

  const int replicas_;
  const SyncConfig sync_;
  const std::vector<Batch> batches_ = make_batches(6, 24, 5, TinyOptions().vocab);
  std::vector<Tiny> models_;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers_;
  std::vector<at::Tensor> outer_, moved_, sent_;  // one for each parameter
  std::vector<std::int64_t> fragment_;
  std::int64_t arrives_ = 0;
};

Strategy sgd_with_sync(const Shape& shape, SyncType type, std::int64_t every) {
  Strategy strategy = with_sync(shape, type, every, plain_sgd);
  strategy.optimizer.momentum = 0.9;
  strategy.sync.outer = {0.6, 0.8};
  return strategy;
}

TEST(OuterSteps, DilocoEqualsAReferenceInPlainLibTorch) {
  for (const Shape& shape : kShapes) {
    const Strategy strategy = sgd_with_sync(shape, SyncType::kDiloco, 2);
    const auto got = values_of_steps(shape, strategy, 6);
    expect_close(got[0][5], Reference(shape.replicas, strategy).after(6), 1e-6, name_of(shape.placed));
  }
}

TEST(OuterSteps, StreamingDilocoEqualsAReferenceInPlainLibTorch) {
  struct Case {
    std::int64_t every, fragments, delay;
    double mix;
  };
  for (const Shape& shape : kShapes) {
    for (const Case& each : {Case{4, 2, 1, 0.5}, Case{6, 3, 2, 0.25}, Case{2, 2, 0, 0}, Case{3, 1, 2, 0.5}}) {
      Strategy strategy = sgd_with_sync(shape, SyncType::kStreamingDiloco, each.every);
      strategy.sync.fragments = each.fragments;
      strategy.sync.delay = each.delay;
      strategy.sync.mix = each.mix;
      const auto got = values_of_steps(shape, strategy, 9);
      const Values wanted = Reference(shape.replicas, strategy).after(9);
      expect_close(got[0][8], wanted, 2e-6, name_of(shape.placed) + ", every " + std::to_string(each.every));
    }
  }
}

TEST(OuterSteps, StreamBesideComputeGivesTheReferencesValues) {
  at::set_num_threads(1);
  on_hosts(2, 2, [](const Mesh& mesh) {
    const Shape shape{2, 1, ShardingStrategy::kNoShard};
    const Strategy strategy = sgd_with_sync(shape, SyncType::kStreamingDiloco, 4);
    const Values got = trained(mesh, strategy, 9);
    if (mesh.rank() != 0) return;
    const double far = distance(got, Reference(2, strategy).after(9));
    require(far < 1e-5, "fragments sent over a network lead " + std::to_string(far) + " away");
  });
}

TEST(OuterSteps, InnerStepsSendNothingAndOuterStepsSendMastersOnce) {
  for (const Shape& shape : kShapes) {
    if (shape.placed.shared) continue;  // this case is left out, since all ranks share one buffer
    for (const SyncType type : {SyncType::kLocalSgd, SyncType::kDiloco, SyncType::kStreamingDiloco}) {
      SCOPED_TRACE(text_of(shape, type));
      std::mutex mutex;
      std::vector<std::unique_ptr<CallsOfGroups>> counts;
      thread_local CallsOfGroups* own = nullptr;
      const auto wrap = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
        const std::lock_guard lock(mutex);
        counts.push_back(std::make_unique<CallsOfGroups>());
        own = counts.back().get();
        return wrapped_groups(std::move(factory), [counted = own](const std::string& use, auto group) {
          return std::make_shared<CountedCollectives>(std::move(group), (*counted)[use], use == "replicate");
        });
      };
      run_ranks({.ranks = shape.ranks(), .wrap_groups = wrap}, [&](const Mesh& mesh) {
        Session session(mesh, with_sync(shape, type, 3));
        const auto of = [](const char* name) { return (*own)[name]; };
        std::int64_t masters = 0;  // elements of this rank's part
        for (const auto& [name, value] : session.values()) masters += value.numel();
        const bool streams = type == SyncType::kStreamingDiloco;
        std::int64_t sent = 0;    // bytes of the first of two fragments
        std::int64_t inner = -1;  // the bytes of a step without an outer step
        for (std::size_t i = 0; i < 6; ++i) {
          const Calls replicate = of("replicate"), world = of("world"), replica = of("replica");
          const TrafficCounts before = session.engine.traffic();
          session.train(i);
          const TrafficCounts after = session.engine.traffic();
          const std::int64_t told = after.reduced_bytes - before.reduced_bytes;
          const bool outer = (i + 1) % 3 == 0 || (streams && i % 3 == 0);
          EXPECT_EQ(of("world").calls, world.calls) << i;
          EXPECT_GT(of("replica").calls, replica.calls) << i;
          if (!outer) {
            EXPECT_EQ(of("replicate").calls, replicate.calls) << i;
            inner = told;
            continue;
          }
          std::int64_t bytes = of("replicate").bytes - replicate.bytes;
          if (inner >= 0) {
            EXPECT_EQ(told - inner, bytes) << i;
          }
          if (streams && i % 3 == 0) {
            EXPECT_GT(bytes, 0);
            sent = bytes;
            continue;
          }
          bytes += sent;
          EXPECT_EQ(of("replicate").later, streams ? of("replicate").calls : 0) << i;
          const bool sharded = shape.placed.kind != ShardingStrategy::kNoShard;
          const std::int64_t parts = sharded ? shape.shards : 1;
          EXPECT_GE(bytes * parts, masters * 4) << i;  // the two are equal apart from the padding of units
          EXPECT_LE(bytes * parts, masters * 4 + 16 * 1024) << i;
        }
      });
    }
  }
}

TEST(OuterSteps, OuterGradientsOverANetworkAreCompressed) {
  at::set_num_threads(1);
  on_hosts(2, 2, [](const Mesh& mesh) {
    const Shape shape{2, 1, ShardingStrategy::kNoShard};
    const auto diloco = [&](WireForm form) {
      Strategy strategy = with_sync(shape, SyncType::kDiloco, 2);
      strategy.compression.gradients = strategy.compression.sums = form;
      if (form != WireForm::kPlain) strategy.compression.axes = CompressedAxes::kReplicate;
      std::int64_t bytes = 0;
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 6; ++i) {
        const std::int64_t before = session.engine.traffic().reduced_bytes;
        session.train(i);
        if (i == 1) bytes = session.engine.traffic().reduced_bytes - before;
      }
      return std::pair(session.values(), bytes);
    };
    const auto [plain, plain_bytes] = diloco(WireForm::kPlain);
    const auto [fewer, fewer_bytes] = diloco(WireForm::kInt8);
    require(fewer_bytes < 0.3 * plain_bytes,
            "int8 is told to send " + std::to_string(fewer_bytes) + " of " + std::to_string(plain_bytes) + " bytes");
    const double far = distance(fewer, plain);
    require(far > 0 && far < 0.02, "int8 outer gradients lead " + std::to_string(far) + " away");
  });
}

TEST(OuterSteps, RankThatDiesInAnOuterStepIsNamed) {
  at::set_num_threads(1);
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    join_as(rank, 2, port, 2);
    const Mesh mesh = init();
    Session session(mesh, with_sync({2, 1, ShardingStrategy::kNoShard}, SyncType::kDiloco, 2));
    session.train(0);
    if (rank == 1) ::raise(SIGKILL);
    const std::string told = error_of([&] { session.train(1); });
    require(told.find("rank 1") != std::string::npos && told.find("all_reduce") != std::string::npos,
            "rank 0 was told: " + told);
    return absl::OkStatus();
  });
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_EQ(ends[0].exit_code, ExitCode::kOk) << ends[0].message;
}

/// A run is saved after some of its steps, and another run continues from the checkpoint with the same bits.
TEST(OuterSteps, CheckpointResumesWithTheSameBits) {
  constexpr SyncType kTypes[] = {SyncType::kLocalSgd, SyncType::kDiloco, SyncType::kStreamingDiloco};
  constexpr std::size_t kSavedAfter[] = {4, 5};  // saves right after an outer step, and between two outer steps
  for (const auto& each : pairwise_of(kShapes, kTypes, kSavedAfter)) {
    const Shape& shape = std::get<0>(each);
    const SyncType type = std::get<1>(each);
    const std::size_t saved_after = std::get<2>(each);
    SCOPED_TRACE(text_of(shape, type) + ", saved after " + std::to_string(saved_after));
    const TestFolder folder;
    const Strategy strategy = with_sync(shape, type, 2, [](Strategy& s) { s.ema.decay = 0.9; });
    std::vector<Values> wanted(static_cast<std::size_t>(shape.ranks()));
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < saved_after; ++i) session.train(i);
      save_checkpoint(session.engine, folder.path());
      for (std::size_t i = saved_after; i < 9; ++i) session.train(i);
      wanted[static_cast<std::size_t>(mesh.rank())] = session.values();
    });
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder.path());
      EXPECT_THAT(loaded.inexact, ::testing::IsEmpty());
      for (std::size_t i = saved_after; i < 9; ++i) session.train(i);
      EXPECT_TRUE(all_same_bits(session.values(), wanted[static_cast<std::size_t>(mesh.rank())]));
    });
  }
}

Strategy post_local_sgd(const Shape& shape) {
  Strategy strategy = with_sync(shape, SyncType::kPostLocalSgd, 2, [](Strategy& s) { s.ema.decay = 0.9; });
  strategy.sync.start_step = 3;
  return strategy;
}

TEST(OuterSteps, PostLocalSgdSyncsEachStepAndThenLocally) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(name_of(shape.placed));
    const TestFolder folder;
    Strategy plain = post_local_sgd(shape), later = plain;
    plain.sync = {};
    later.sync.type = SyncType::kLocalSgd;
    later.sync.start_step = 0;
    std::vector<Values> wanted(static_cast<std::size_t>(shape.ranks()));
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      {
        Session session(mesh, plain);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
      }
      Session session(mesh, later);
      load_checkpoint(session.engine, folder.path());
      for (std::size_t i = 3; i < 7; ++i) session.train(i);
      wanted[static_cast<std::size_t>(mesh.rank())] = session.values();
    });
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      Session session(mesh, post_local_sgd(shape));
      const Strategy& strategy = session.engine.strategy();
      for (std::size_t i = 0; i < 7; ++i) {
        const StepResult result = session.train(i);
        if (i == 0 || i == 3) {  // these are the first steps under each of two plans
          EXPECT_EQ(result.planned, result.allocated) << i;
        }
      }
      EXPECT_TRUE(all_same_bits(session.values(), wanted[static_cast<std::size_t>(mesh.rank())]));
      EXPECT_EQ(&session.engine.strategy(), &strategy);
    });
  }
}

TEST(OuterSteps, CheckpointsResumeAcrossTheStartStep) {
  for (const Shape& shape : kShapes) {
    for (const std::size_t saved_after : {2, 3, 5}) {
      SCOPED_TRACE(name_of(shape.placed) + ", saved after " + std::to_string(saved_after));
      const TestFolder folder;
      std::vector<Values> wanted(static_cast<std::size_t>(shape.ranks()));
      run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
        Session session(mesh, post_local_sgd(shape));
        for (std::size_t i = 0; i < saved_after; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
        for (std::size_t i = saved_after; i < 8; ++i) session.train(i);
        wanted[static_cast<std::size_t>(mesh.rank())] = session.values();
      });
      for (const std::size_t trained_before : {0, 5}) {
        run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
          Session session(mesh, post_local_sgd(shape));
          for (std::size_t i = 0; i < trained_before; ++i) session.train(i);
          EXPECT_NE(error_of([&] { load_checkpoint(session.engine, folder.path() / "none"); }), "");
          load_checkpoint(session.engine, folder.path());
          for (std::size_t i = saved_after; i < 8; ++i) session.train(i);
          EXPECT_TRUE(all_same_bits(session.values(), wanted[static_cast<std::size_t>(mesh.rank())]));
        });
      }
    }
  }
}

TEST(OuterSteps, CheckpointResumesWithAnotherNumberOfReplicas) {
  const TestFolder folder;
  Values saved;
  const Shape before{2, 2, ShardingStrategy::kHybridShard};
  run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
    Session session(mesh, with_sync(before, SyncType::kDiloco, 2));
    for (std::size_t i = 0; i < 4; ++i) session.train(i);
    save_checkpoint(session.engine, folder.path());
    const Values values = session.values();
    if (mesh.rank() == 0) saved = values;
  });
  for (const Shape& shape : {Shape{3, 1, ShardingStrategy::kNoShard}, Shape{2, 1, ShardingStrategy::kHybridShard},
                             Shape{1, 2, ShardingStrategy::kShardOptimizer}}) {
    const auto go_on = [&](const Mesh& mesh) {
      Session session(mesh, with_sync(shape, SyncType::kDiloco, 2));
      load_checkpoint(session.engine, folder.path());
      EXPECT_TRUE(all_same_bits(session.values(), saved));
      for (std::size_t i = 4; i < 6; ++i) EXPECT_LT(session.train(i).loss, 4.0);
    };
    run_ranks({.ranks = shape.ranks()}, go_on);
  }
}

TEST(OuterSteps, WriteBetweenOuterStepsReachesAllReplicas) {
  for (const Shape& shape : kShapes) {
    std::vector<Values> after(static_cast<std::size_t>(shape.ranks()));
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      Session session(mesh, with_sync(shape, SyncType::kDiloco, 4));
      session.train(0);
      {
        Gathered guard(session.engine, Gathered::kWrite);
        const at::NoGradGuard no_grad;
        session.model->head.fill_(0.25);
        guard.close();
      }
      after[static_cast<std::size_t>(mesh.rank())] = session.values();
      session.train(1);
      const std::string told = usage_error_of([&] { session.engine.set_trainable("blocks.0.*", false); });
      EXPECT_THAT(told, HasSubstr("set_trainable with \"sync\""));
    });
    for (const Values& values : after) EXPECT_TRUE(all_same_bits(values, after[0]));
  }
}

TEST(OuterSteps, TwoEnginesHaveOuterStepsOfTheirOwn) {
  const Shape shape{2, 1, ShardingStrategy::kNoShard};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session first(mesh, with_sync(shape, SyncType::kDiloco, 2)), second(mesh, with_sync(shape, SyncType::kLocalSgd, 3));
    for (std::size_t i = 0; i < 6; ++i) {
      first.train(i);
      second.train(i);
    }
    EXPECT_FALSE(all_same_bits(first.values(), second.values()));
    EXPECT_TRUE(all_same_bits(second.values(), trained(mesh, with_sync(shape, SyncType::kLocalSgd, 3), 6)));
  });
}

TEST(OuterSteps, NextEngineBeginsWithReplicaZerosValues) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(name_of(shape.placed));
    std::vector<Values> left(static_cast<std::size_t>(shape.ranks())), taken = left;
    run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      Tiny model = make_tiny({}, false);
      const std::vector<Batch> batches = make_batches(2, 24, 5, TinyOptions().vocab);
      const Strategy strategy = with_sync(shape, SyncType::kDiloco, 4);
      {
        Engine engine(model, strategy, mesh);
        for (const Batch& batch : batches) {
          engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
          engine.step();
        }
        const Gathered guard(engine);
        left[rank] = values_of(*model);
      }
      Engine next(model, strategy, mesh);
      const Gathered guard(next);
      taken[rank] = values_of(*model);
    });
    EXPECT_FALSE(all_same_bits(left[0], left.back()));
    for (const Values& values : taken) EXPECT_TRUE(all_same_bits(values, left[0]));
  }
}

TEST(OuterSteps, SavingWeightsUnderEmaWeightsChangesNothing) {
  for (const Shape& shape : kShapes) {
    for (const SyncType type : {SyncType::kLocalSgd, SyncType::kDiloco}) {
      const Strategy strategy = with_sync(shape, type, 4, [](Strategy& s) { s.ema.decay = 0.9; });
      const TestFolder folder;
      run_ranks({.ranks = shape.ranks()}, [&](const Mesh& mesh) {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 6; ++i) {
          session.train(i);
          if (i != 1) continue;
          const EmaWeights averages(session.engine);
          save_weights(session.engine, folder / "weights.pt");
        }
        EXPECT_TRUE(all_same_bits(session.values(), trained(mesh, strategy, 6))) << text_of(shape, type);
      });
    }
  }
}

TEST(OuterSteps, ReplicaWithoutUpdatesDoesNotCountInStates) {
  const Shape shape{2, 1, ShardingStrategy::kNoShard};
  const TestFolder folder;
  Values before, after[2];
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, with_sync(shape, SyncType::kLocalSgd, 8, [](Strategy& s) { s.ema.decay = 0.9; }));
    for (std::size_t i = 0; i < 3; ++i) {
      const double factor = mesh.rank() == 1 ? std::numeric_limits<double>::infinity() : 1;
      session.engine.backward(session.loss(i) * factor);
      EXPECT_EQ(session.engine.step().overflow, mesh.rank() == 1);
    }
    const auto averages = [&] {
      const EmaWeights shown(session.engine);
      return session.values();
    };
    const Values own = averages();
    if (mesh.rank() == 0) before = own;
    save_checkpoint(session.engine, folder.path());
    after[mesh.rank()] = averages();
    EXPECT_EQ(session.engine.steps_applied(), 3);
  });
  for (const Values& values : after) expect_close(values, before, 1e-6, "averages");
}

TEST(OuterSteps, PlanAboveTheMemoryLimitIsRefusedAtTheStart) {
  const Shape shape{2, 1, ShardingStrategy::kNoShard};
  for (const bool fits : {false, true}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = with_sync(shape, SyncType::kDiloco, 2);
      strategy.sync.start_step = 3;
      Tiny model = make_tiny({}, false);
      const std::int64_t needed = plan_memory(*model, strategy, mesh.topology()).use.limited();
      strategy.memory.limit_bytes = fits ? needed : needed - 1;
      const std::string told = error_of([&] { Session(mesh, strategy).train(0); });
      EXPECT_EQ(told.find("/memory/limit") == std::string::npos, fits) << told;
      EXPECT_EQ(told.empty(), fits);
    });
  }
}

TEST(OuterSteps, BuffersStayLocalWhenOuterStepsBegin) {
  const Shape shape{2, 2, ShardingStrategy::kHybridShard};
  run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
    Tiny model = make_tiny({}, false);
    const at::Tensor buffer = model->register_buffer("own", at::zeros({1}));
    Engine engine(model, post_local_sgd(shape), mesh);
    buffer.fill_(mesh.rank());
    const std::vector<Batch> batches = make_batches(4, 24, 5, TinyOptions().vocab);
    for (const Batch& batch : batches) {
      engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
      engine.step();
    }
    EXPECT_EQ(buffer.item<float>(), static_cast<float>(mesh.rank()));
  });
}

TEST(OuterSteps, RefusedCheckpointChangesNothing) {
  const Shape shape{2, 2, ShardingStrategy::kHybridShard};
  Strategy strategy = post_local_sgd(shape);
  strategy.sync.type = SyncType::kDiloco;
  const TestFolder folder;
  run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    session.train(0);
    const std::string path = save_checkpoint(session.engine, folder.path());
    if (mesh.is_main()) {  // this changes a byte of the last chunk
      std::fstream file(path + "/rank-00000.safetensors", std::ios::in | std::ios::out);
      file.seekp(-1, std::ios::end);
      file.put('x');
    }
    for (std::size_t i = 1; i < 5; ++i) session.train(i);
    EXPECT_NE(error_of([&] { load_checkpoint(session.engine, path); }), "");
    for (std::size_t i = 5; i < 7; ++i) session.train(i);
    Session other(mesh, strategy);
    for (std::size_t i = 0; i < 7; ++i) {
      other.train(i);
      if (i == 0) save_checkpoint(other.engine, folder.path());
    }
    EXPECT_TRUE(all_same_bits(session.values(), other.values()));
  });
}

TEST(OuterSteps, UnusedOuterMomentumOfACheckpointIsReported) {
  const Shape shape{2, 1, ShardingStrategy::kNoShard};
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, with_sync(shape, SyncType::kDiloco, 2));
    for (std::size_t i = 0; i < 2; ++i) session.train(i);
    save_checkpoint(session.engine, folder.path());
    for (const SyncType type : {SyncType::kEachStep, SyncType::kLocalSgd}) {
      Strategy strategy = with_sync(shape, type, type == SyncType::kEachStep ? 0 : 2);
      Session other(mesh, strategy);
      EXPECT_THAT(load_checkpoint(other.engine, folder.path()).inexact,
                  ::testing::Contains(HasSubstr("momentum of outer steps was left out")));
    }
  });
}

TEST(OuterSteps, UnsupportedKeysBesideSyncAreRefused) {
  const std::pair<const char*, const char*> refused[] = {
      {R"("optimizer": {"type": "muon"})", "optimizer.type muon"},
      {R"("optimizer": {"state_dtype": "bf16"})", "state_dtype bf16 or 8bit"},
      {R"("optimizer": {"in_backward": true})", "in_backward"},
      {R"("mixed_precision": {"param": "fp16"})", "param fp16"},
      {R"("on_spike": {"action": "skip"})", "on_spike"},
      {R"("durable": {"every": 1, "dir": "d"})", "durable"},
      {R"("checkpoint": {"async": true})", "checkpoint.async"},
      {R"("check": {"replica_hash_every": 1})", "check.replica_hash_every"},
      {R"("broadcast_buffers": "mean")", "broadcast_buffers"},
      {R"("compression": {"gradients": "int8", "error_feedback": true})", "error_feedback"},
      {R"("compression": {"method": {"type": "random_k"}})", "compression.method"}};
  for (const auto& [with, named] : refused) {
    const std::string text =
        R"({"strategy": "NO_SHARD", "sync": {"type": "diloco", "every": 4}, )" + std::string(with) + "}";
    EXPECT_THAT(error_of([&] { Strategy::from_json(text); }), HasSubstr(std::string("cannot stand beside"))) << with;
    EXPECT_THAT(error_of([&] { Strategy::from_json(text); }), HasSubstr(named)) << with;
  }
  EXPECT_THAT(error_of([] { Strategy::from_json(R"({"sync": {"type": "local_sgd"}})"); }), HasSubstr("\"every\""));
  const auto compressed = [](const std::string& type, const std::string& axes) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "NO_SHARD", "sync": {"every": 4, "type": ")" + type +
                          R"("}, "compression": {"gradients": "int4", "axes": ")" + axes + "\"}}");
    });
  };
  EXPECT_THAT(compressed("local_sgd", "replicate"), HasSubstr("weights as they are"));
  EXPECT_THAT(compressed("diloco", "both"), HasSubstr("\"axes\": \"replicate\""));
  EXPECT_EQ(compressed("diloco", "replicate"), "");
  const auto told = [](const std::string& sync) {
    return error_of([&] { Strategy::from_json(R"({"strategy": "NO_SHARD", "sync": {"every": 4, )" + sync + "}}"); });
  };
  EXPECT_THAT(told(R"("type": "post_local_sgd")"), HasSubstr("\"start_step\" above 0"));
  EXPECT_THAT(told(R"("type": "streaming_diloco", "delay": 2)"), HasSubstr("need \"every\" to be 8 or more"));
  EXPECT_THAT(told(R"("type": "diloco", "fragments": 2)"), HasSubstr("streaming_diloco"));
  EXPECT_EQ(told(R"("type": "streaming_diloco")"), "");
}

}  // namespace outer_steps_test
}  // namespace tessera::testing
