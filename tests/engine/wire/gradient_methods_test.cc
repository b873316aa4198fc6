// Tests compressors over a network together with all settings that change how gradients are sent. Ranks are processes
// that Gloo joins.

#include "tests/engine/wire/gradient_methods.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/limits/long_tests.h"

namespace tessera::testing {
namespace gradient_methods_test {

struct Method {
  const char* name;
  Adjust adjust;
  double far = 0.1;          ///< the largest distance from exact values after kTimes steps
  bool keeps = true;         ///< whether the method keeps values from step to step
  bool draws = false;        ///< whether its random numbers depend on the number of the step
  std::int64_t shorter = 2;  ///< a rank sends at most 1 / `shorter` of the bytes of its gradients
};

const Method kMethods[] = {{"PowerSGD", power_sgd(2)},
                           {"top-k", top_k(0.05), 0.1, true, false, 8},
                           {"top-k with momentum", top_k(0.05, 0.5), 0.1, true, false, 8},
                           {"random-k", random_k(0.05), 0.1, true, true, 16},
                           {"signs by vote", with_method(SignMajorityConfig()), 4, false, false, 12},
                           {"signs with feedback", with_method(SignFeedbackConfig()), 0.1, true, false, 24},
                           {"one bit", one_bit(), 0.1, true, false, 12},
                           {"QSGD", with_method(QsgdConfig()), 0.1, false, true, 7},
                           {"TernGrad", with_method(TernGradConfig()), 0.1, false, true, 12}};

std::int64_t reduced_in_a_step(Session& session, std::size_t i) {
  const std::int64_t before = session.engine.traffic().reduced_bytes;
  session.train(i);
  return session.engine.traffic().reduced_bytes - before;
}

TEST(GradientMethods, BytesSentEqualThePrediction) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const std::int64_t vocab = 19, width = 12, hidden = 31, blocks = 3;
    Session plain(mesh, strategy_for(ShardingStrategy::kNoShard, descend));
    const MemoryUse less = plain.engine.allocated();
    const auto expect = [&](const Adjust& adjust, std::int64_t wire_numel) {
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, adjust));
      for (std::size_t i = 0; i < 3; ++i) {
        const std::int64_t bytes = reduced_in_a_step(session, i);
        require(bytes == wire_numel * 4, std::to_string(bytes) + " bytes for " + std::to_string(wire_numel * 4));
      }
      const MemoryUse use = session.engine.allocated();
      require(use == session.engine.plan().use, "the plan is what is allocated");
      require(use[MemoryCategory::kFeedback] > 0, "it holds what is kept");
      require(use.total() - less.total() == use[MemoryCategory::kFeedback], "nothing else is in the plan");
    };
    const std::int64_t rank = 2, vectors = 3 * width + hidden;
    expect(power_sgd(rank), 2 * (vocab + width) * rank + blocks * (2 * (hidden + width) * rank + vectors));
    const auto count = [](std::int64_t numel) { return (numel + 19) / 20; };
    expect(top_k(0.05), 2 * (count(2 * vocab * width) + blocks * count(2 * hidden * width + vectors)));
  });
}

TEST(GradientMethods, MethodsSendLessAndTheirMemoryIsPlanned) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    Session plain(mesh, strategy_for(ShardingStrategy::kNoShard, descend));
    const MemoryUse less = plain.engine.allocated();
    const std::int64_t all = reduced_in_a_step(plain, 0);
    for (const Method& method : kMethods) {
      for (const bool restores : {false, true}) {
        if (restores && !method.keeps) continue;
        Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
                          method.adjust(s);
                          s.compression.restore_skipped = restores;
                        }));
        const std::int64_t bytes = reduced_in_a_step(session, 0);
        require(bytes * method.shorter < all, c10::str(method.name, " sends ", bytes, " for ", all));
        const MemoryUse use = session.engine.allocated();
        require(use == session.engine.plan().use, c10::str(method.name, ": the plan is what is allocated"));
        require(use.total() - less.total() == use[MemoryCategory::kFeedback],
                c10::str(method.name, ": nothing else is in the plan"));
      }
    }
  });
}

/// Trains kTimes steps with the strategy's number of microbatches, and returns the values.
Values trained_on_parts(const Mesh& mesh, const Strategy& strategy, TinyOptions options) {
  Session session(mesh, strategy, options);
  for (std::size_t i = 0; i < kTimes; ++i) {
    for (std::int64_t k = 0; k < strategy.gradient_accumulation; ++k)
      session.engine.backward(session.loss(i + static_cast<std::size_t>(k)));
    session.engine.step();
  }
  return session.values();
}

/// Tests methods together with the other settings. `plain`: the strategy without a method.
void expect_to_work_with_everything(std::span<const Method> methods, const Adjust& plain) {
  TinyOptions unused, recomputed;
  unused.frozen_first_block = unused.unused_block = true;
  recomputed.shared_block = recomputed.recompute = recomputed.tied_head = true;
  on_hosts(2, 2, [&](const Mesh& mesh) {
    std::size_t turn = 0;
    const auto expect_alike = [&](const std::string& what, TinyOptions options, const Adjust& adjust) {
      const auto run = [&](ShardingStrategy kind, const Adjust& method) {
        const auto both = [&](Strategy& strategy) {
          method(strategy);
          if (adjust) adjust(strategy);
        };
        return trained_on_parts(mesh, strategy_for(kind, both), options);
      };
      const Values exact = run(ShardingStrategy::kNoShard, plain);
      for (const Method& method : methods) {
        const Values values = run(ShardingStrategy::kNoShard, method.adjust);
        const double far = distance(values, exact);
        require(far > 0 && far < method.far, c10::str(method.name, ", ", what, ": ", far, " away"));
        const ShardingStrategy others[] = {ShardingStrategy::kShardOptimizer, ShardingStrategy::kShardGradients};
        ++turn;
        for (std::size_t k = 0; k < 2; ++k) {
          if (!tests_are_long() && k != turn % 2) continue;  // short tests take one of the two in turn
          require(all_same_bits(run(others[k], method.adjust), values),
                  c10::str(method.name, ", ", what, ": ", name_of(others[k]), " has other bits"));
        }
      }
    };
    expect_alike("not all used", unused, nullptr);
    expect_alike("recomputed", recomputed, nullptr);
    expect_alike("accumulation", {}, [](Strategy& s) { s.gradient_accumulation = 2; });
    expect_alike("late sync", {}, [](Strategy& s) {
      s.gradient_accumulation = 2;
      s.gradient_sync = GradientSync::kLastMicrobatch;
    });
    expect_alike("in backward", {}, update_in_backward);
    expect_alike("one after the other", {}, [](Strategy& s) { s.reductions_ahead = 0; });
    expect_alike("three ahead", {}, [](Strategy& s) { s.reductions_ahead = 3; });
  });
}

TEST(GradientMethods, OtherGradientOptionsBesideThemStayClose) { expect_to_work_with_everything(kMethods, descend); }

TEST(GradientMethods, OneBitMomentumWorksBesideOtherGradientOptions) {
  const Method of_momentum = {"one bit of momentum", one_bit_of_momentum};
  expect_to_work_with_everything({&of_momentum, 1}, descend_with_momentum);
}

// The method learns like an optimizer with the same momentum.
TEST(GradientMethods, OneBitMomentumReachesTheUncompressedLoss) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const auto loss_after = [&](const Adjust& adjust) {
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& strategy) {
                        adjust(strategy);
                        strategy.optimizer.lr = 0.2;
                        strategy.check.replica_hash_every = 0;
                      }));
      require(session.engine.allocated() == session.engine.plan().use, "the plan is what is allocated");
      double loss = 0;
      for (std::size_t i = 0; i < 40; ++i) loss = session.train(0).loss;
      return loss;
    };
    const double exact = loss_after(descend_with_momentum), loss = loss_after(one_bit_of_momentum);
    require(loss < 1.05 * exact, c10::str("loss ", loss, ", uncompressed ", exact));
  });
}

TEST(GradientMethods, SharedMemoryIsNotCompressed) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const Values plain = trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), kTimes);
    for (const Method& method : kMethods) {
      const char* const name = method.name;
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, method.adjust));
      EXPECT_EQ(session.engine.allocated()[MemoryCategory::kFeedback], 0) << name;
      for (std::size_t i = 0; i < kTimes; ++i) session.train(i);
      EXPECT_TRUE(all_same_bits(session.values(), plain)) << name;
    }
  });
}

// The methods sum only over the ranks of one replica, so replicas would drift apart.
TEST(GradientMethods, MeshOfSeveralReplicasIsRefused) {
  run_ranks({.ranks = 4}, [](const Mesh& mesh) {
    for (const Method& method : kMethods) {
      const Strategy strategy = strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
        method.adjust(s);
        s.mesh.shard = 2;
      });
      EXPECT_THAT(error_of([&] { Session session(mesh, strategy); }), ::testing::HasSubstr("a mesh of one replica"));
    }
  });
}

TEST(GradientMethods, MethodsBeginAtTheirStartStep) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const Strategy plain = strategy_for(ShardingStrategy::kNoShard, descend);
    const Values three = trained(mesh, plain, 3), four = trained(mesh, plain, 4);
    for (const Method& method : kMethods) {
      const auto run = [&](std::size_t steps) {
        const auto later = [&](Strategy& s) {
          method.adjust(s);
          s.compression.start_step = 3;
        };
        return trained(mesh, strategy_for(ShardingStrategy::kNoShard, later), steps);
      };
      require(all_same_bits(run(3), three), c10::str(method.name, ": three steps are plain"));
      require(!all_same_bits(run(4), four), c10::str(method.name, ": the fourth is not"));
    }
  });
}

/// Checks that two steps after `happens` lead to the same values as two steps of a new Engine over the same parameters.
void expect_to_begin_anew(const Mesh& mesh, const Adjust& method, const std::function<void(Session&)>& happens,
                          const std::string& what) {
  Session session(mesh, strategy_for(ShardingStrategy::kNoShard, method));
  for (std::size_t i = 0; i < 3; ++i) session.train(i);
  happens(session);
  const Values before = session.values();
  session.train(3);
  session.train(4);
  Session fresh(mesh, strategy_for(ShardingStrategy::kNoShard, method));
  {
    const Gathered gathered(fresh.engine, Gathered::kWrite);
    const at::NoGradGuard no_grad;
    const auto parameters = fresh.model->named_parameters();
    for (const auto& [name, value] : before) parameters[name].copy_(value);
  }
  fresh.train(3);
  fresh.train(4);
  require(all_same_bits(session.values(), fresh.values()), what + " does not begin anew");
}

TEST(GradientMethods, ResidualsOfAnotherRunAreDropped) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    for (const auto& [name, method, far, keeps, draws, shorter] : kMethods) {
      if (!keeps || draws) continue;
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.backward(session.loss(1) * std::numeric_limits<float>::infinity());
            require(session.engine.step().overflow, "an infinite loss is skipped");
          },
          std::string(name) + " after a skipped step");
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.backward(session.loss(1) * std::numeric_limits<float>::quiet_NaN());
            session.engine.zero_grad();
          },
          std::string(name) + " after gradients that were dropped");
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.set_trainable("blocks.0.*", false);
            session.engine.set_trainable("blocks.0.*", true);
          },
          std::string(name) + " after set_trainable");
    }
  });
}

Adjust with_codes(WireForm form) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.gradients = form;
    strategy.compression.error_feedback = true;
  };
}

// A run is as if the skipped step had not been made, except with methods whose draws depend on the step's number.
TEST(GradientMethods, SkippedStepRestoresTheResiduals) {
  std::vector<Method> methods(std::begin(kMethods), std::end(kMethods));
  methods.push_back({"int8", with_codes(WireForm::kInt8)});
  methods.push_back({"int4", with_codes(WireForm::kInt4)});
  on_hosts(2, 2, [&](const Mesh& mesh) {
    for (const Method& method : methods) {
      if (!method.keeps || method.draws) continue;
      const auto run = [&](bool restores, const std::function<void(Session&)>& happens) {
        Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
                          method.adjust(s);
                          s.compression.restore_skipped = restores;
                        }));
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        happens(session);
        session.train(3);
        session.train(4);
        return session.values();
      };
      const auto nothing = [](Session&) {};
      const auto skipped = [](Session& session) {
        session.engine.backward(session.loss(1) * std::numeric_limits<float>::quiet_NaN());
        require(session.engine.step().overflow, "a loss that is no number is skipped");
      };
      const auto dropped = [](Session& session) {
        session.engine.backward(session.loss(1));
        session.engine.zero_grad();
      };
      const Values wanted = run(false, nothing);
      require(all_same_bits(run(true, nothing), wanted), c10::str(method.name, ": a copy changes nothing"));
      require(all_same_bits(run(true, skipped), wanted), c10::str(method.name, ": a skipped step is given back"));
      require(all_same_bits(run(true, dropped), wanted), c10::str(method.name, ": so are dropped gradients"));
      require(!all_same_bits(run(false, skipped), wanted), c10::str(method.name, ": without, it begins anew"));
    }
  });
}

// No codec may hide that a gradient is not finite.
TEST(GradientMethods, NonFiniteGradientsSkipTheStep) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    for (const Method& method : kMethods) {
      for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        Session session(mesh, strategy_for(ShardingStrategy::kNoShard, method.adjust));
        session.train(0);
        session.engine.backward(session.loss(1) * (mesh.rank() == 1 ? bad : 1.0f));
        require(session.engine.step().overflow, c10::str(method.name, " hides ", bad));
      }
    }
  });
}

TEST(GradientMethods, MethodsWithResidualsReachTheUncompressedLoss) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    constexpr std::size_t kMany = 40;
    const auto loss_after = [&](const Adjust& adjust) {
      const auto faster = [&](Strategy& strategy) {
        adjust(strategy);
        strategy.optimizer.lr = 0.3;
        strategy.check.replica_hash_every = 0;
      };
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, faster));
      double loss = 0;
      for (std::size_t i = 0; i < kMany; ++i) loss = session.train(0).loss;
      return loss;
    };
    const double exact = loss_after(descend);
    for (const auto& [name, method, far, keeps, draws, shorter] : kMethods) {
      if (!keeps) continue;
      const double loss = loss_after(method);
      require(loss < (draws ? 1.2 : 1.05) * exact, c10::str(name, ": loss ", loss, ", uncompressed ", exact));
    }
  });
}

}  // namespace gradient_methods_test
}  // namespace tessera::testing
