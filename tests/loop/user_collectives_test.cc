// Tests the collectives that programs call. They are right on every number of ranks and independent of the Engine's own
// calls. If ranks' calls differ, the error names the ranks.

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

void on_ranks(const std::function<void(const Mesh&)>& body) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    run_ranks({.ranks = ranks}, body);
  }
  SCOPED_TRACE("two hosts");
  run_ranks({.ranks = 4, .hosts = 2}, body);
}

/// Returns a tensor of small integers, so that sums are exact in every dtype. Each rank has another tensor.
at::Tensor numbers(int rank, at::IntArrayRef sizes, at::ScalarType type) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  return ((at::arange(numel, at::kLong) * (rank + 1)) % 7).to(type).view(sizes);
}

at::Tensor expected(const Mesh& mesh, at::IntArrayRef sizes, at::ScalarType type, Reduce operation) {
  at::Tensor result = numbers(0, sizes, type);
  for (int rank = 1; rank < mesh.world_size(); ++rank) {
    const at::Tensor other = numbers(rank, sizes, type);
    if (operation == Reduce::kMin) {
      result = at::minimum(result, other);
    } else if (operation == Reduce::kMax) {
      result = at::maximum(result, other);
    } else {
      result = result + other;
    }
  }
  return operation == Reduce::kMean ? (result.to(at::kDouble) / mesh.world_size()).to(type) : result;
}

TEST(UserCollectives, AllReduceEqualsOneProcessInEveryDtype) {
  on_ranks([](const Mesh& mesh) {
    for (const at::ScalarType type :
         {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte}) {
      for (const Reduce operation : {Reduce::kSum, Reduce::kMean, Reduce::kMin, Reduce::kMax}) {
        if (operation == Reduce::kMean && !at::isFloatingType(type)) continue;
        // The last tensor is so large that it is cut into parts. Its size is no multiple of the parts' size.
        for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {0}, {5}, {3, 4}, {70'001}}) {
          const at::Tensor tensor = numbers(mesh.rank(), sizes, type);
          all_reduce(mesh, tensor, operation);
          EXPECT_TRUE(at::equal(tensor, expected(mesh, sizes, type, operation))) << type << at::IntArrayRef(sizes);
        }
      }
    }
  });
}

TEST(UserCollectives, FlagsAndStridedTensorsAreReduced) {
  on_ranks([](const Mesh& mesh) {
    const at::Tensor flags = at::zeros({2}, at::kBool);
    flags[0].fill_(mesh.rank() == mesh.world_size() - 1);
    all_reduce(mesh, flags, Reduce::kMax);
    EXPECT_TRUE(flags[0].item<bool>());
    EXPECT_FALSE(flags[1].item<bool>());

    const at::Tensor whole = at::zeros({4, 6}), column = whole.select(1, 2);
    column.fill_(1);
    all_reduce(mesh, column);
    EXPECT_EQ(whole.sum().item<double>(), 4.0 * mesh.world_size());

    at::Tensor leaf = at::ones({3}).set_requires_grad(true);
    all_reduce(mesh, leaf);
    EXPECT_EQ(leaf.detach().sum().item<double>(), 3.0 * mesh.world_size());
  });
}

TEST(UserCollectives, SumsOfNarrowFloatsAreRoundedOnce) {
  run_ranks({.ranks = 4}, [](const Mesh& mesh) {
    // Adding 1 to 256 in bf16 gives 256, however many times it is done.
    const at::Tensor tensor = at::full({1}, mesh.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
    all_reduce(mesh, tensor);
    EXPECT_EQ(tensor.item<double>(), at::full({1}, 259.0).to(at::kBFloat16).item<double>());
    EXPECT_NE(tensor.item<double>(), 256);
  });
}

TEST(UserCollectives, GatherAndBroadcastCarryTensorsAndStrings) {
  on_ranks([](const Mesh& mesh) {
    const std::vector<at::Tensor> all = all_gather(mesh, numbers(mesh.rank(), {2, 3}, at::kFloat).t());
    ASSERT_EQ(all.size(), static_cast<std::size_t>(mesh.world_size()));
    for (int rank = 0; rank < mesh.world_size(); ++rank)
      EXPECT_TRUE(at::equal(all[rank], numbers(rank, {2, 3}, at::kFloat).t()));

    for (int root = 0; root < mesh.world_size(); ++root) {
      const at::Tensor tensor = numbers(mesh.rank(), {2, 3}, at::kLong);
      broadcast(mesh, tensor, root);
      EXPECT_TRUE(at::equal(tensor, numbers(root, {2, 3}, at::kLong)));
      const std::string text = broadcast(mesh, "from " + std::to_string(mesh.rank()) + std::string(1, '\0'), root);
      EXPECT_EQ(text, "from " + std::to_string(root) + std::string(1, '\0'));
    }
    const std::vector<std::string> texts = all_gather(mesh, std::string(mesh.rank() * 3, 'x'));
    for (int rank = 0; rank < mesh.world_size(); ++rank) EXPECT_EQ(texts[rank], std::string(rank * 3, 'x'));
    EXPECT_EQ(mesh.is_main(), mesh.rank() == 0);
    barrier(mesh);
  });
}

TEST(UserCollectives, AllReduceTakesPlainNumbers) {
  on_ranks([](const Mesh& mesh) {
    const int n = mesh.world_size();
    EXPECT_EQ(all_reduce(mesh, mesh.rank()), n * (n - 1) / 2);
    EXPECT_EQ(all_reduce(mesh, std::int64_t{1} << 60, Reduce::kMax), std::int64_t{1} << 60);
    EXPECT_EQ(all_reduce(mesh, 0.5 + mesh.rank(), Reduce::kMin), 0.5);
    EXPECT_EQ(all_reduce(mesh, mesh.rank() == 0, Reduce::kMin), n == 1);
    EXPECT_TRUE(std::isnan(all_reduce(mesh, std::numeric_limits<double>::quiet_NaN(), Reduce::kMax)));
  });
}

TEST(UserCollectives, MeanIsWeightedBySamplesNotRanks) {
  on_ranks([](const Mesh& mesh) {
    // Rank r saw r samples, each with value r + 1. Rank 0 saw none, and its mean is NaN. A rank alone saw one sample.
    const bool alone = mesh.world_size() == 1;
    const int count = alone ? 1 : mesh.rank();
    const double mean = count > 0 ? mesh.rank() + 1.0 : std::nan("");
    double sum = alone ? 1 : 0, samples = alone ? 1 : 0;
    for (int rank = 1; rank < mesh.world_size(); ++rank) sum += rank * (rank + 1.0), samples += rank;
    EXPECT_DOUBLE_EQ(mean_over_ranks(mesh, mean, count), sum / samples);
    const std::vector<double> both = mean_over_ranks(mesh, std::vector<double>{mean, 2.0}, count);
    EXPECT_DOUBLE_EQ(both.at(0), sum / samples);
    EXPECT_DOUBLE_EQ(both.at(1), 2.0);
    EXPECT_DOUBLE_EQ(mean_over_ranks(mesh, mesh.rank()), (mesh.world_size() - 1) / 2.0);
  });
}

/// Checks that `call` throws Error (64) with all of `texts` on every rank, and that ranks can continue.
void expect_refused(int ranks, const std::function<void(const Mesh&)>& call, const std::vector<std::string>& texts) {
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    try {
      call(mesh);
      ADD_FAILURE() << "rank " << mesh.rank() << " got no error, but should have: " << texts[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kUsage) << error.message();
      for (const std::string& text : texts) EXPECT_THAT(error.message(), HasSubstr(text));
    }
    EXPECT_EQ(all_reduce(mesh, 1), ranks);
  });
}

TEST(UserCollectives, DifferingCallsAreNamedOnAllRanks) {
  expect_refused(3, [](const Mesh& mesh) { all_reduce(mesh, at::zeros({mesh.rank() == 1 ? 4 : 3})); },
                 {"ranks 0, 2: all_reduce (sum) of Float [3]", "rank 1: all_reduce (sum) of Float [4]"});
  expect_refused(2, [](const Mesh& mesh) { all_gather(mesh, at::zeros({3}, mesh.rank() ? at::kDouble : at::kFloat)); },
                 {"rank 0: all_gather of Float [3]", "rank 1: all_gather of Double [3]"});
  expect_refused(2,
                 [](const Mesh& mesh) {
                   if (mesh.rank() == 0) {
                     barrier(mesh);
                   } else {
                     broadcast(mesh, at::zeros({2}));
                   }
                 },
                 {"rank 0: barrier", "rank 1: broadcast from rank 0 of Float [2]"});
  expect_refused(2, [](const Mesh& mesh) { broadcast(mesh, at::zeros({2}), mesh.rank()); },
                 {"rank 0: broadcast from rank 0", "rank 1: broadcast from rank 1"});
  expect_refused(2,
                 [](const Mesh& mesh) { all_reduce(mesh, at::zeros({2}), mesh.rank() ? Reduce::kMin : Reduce::kMax); },
                 {"rank 0: all_reduce (max)", "rank 1: all_reduce (min)"});
}

TEST(UserCollectives, WrongArgumentOfOneRankIsAnErrorOnAllRanks) {
  const auto zeros_unless = [](const Mesh& mesh, const at::Tensor& bad) {
    return mesh.rank() == 1 ? bad : at::zeros({2});
  };
  expect_refused(3, [&](const Mesh& mesh) { all_reduce(mesh, zeros_unless(mesh, at::Tensor())); },
                 {"rank 1: all_reduce was given an undefined tensor"});
  expect_refused(3, [&](const Mesh& mesh) { all_gather(mesh, zeros_unless(mesh, at::zeros({2}).to_sparse())); },
                 {"rank 1: all_gather was given a tensor of SparseCPUFloatType [2]"});
  expect_refused(2, [&](const Mesh& mesh) { broadcast(mesh, zeros_unless(mesh, at::zeros({2}, at::kComplexFloat))); },
                 {"rank 1", "dense tensors"});
  expect_refused(2, [](const Mesh& mesh) { broadcast(mesh, at::zeros({2}), 2); },
                 {"ranks 0, 1", "a root from 0 to 1, got 2"});
  expect_refused(2, [](const Mesh& mesh) { all_reduce(mesh, at::zeros({2}, at::kInt), Reduce::kMean); },
                 {"hint: convert it"});
  expect_refused(2, [](const Mesh& mesh) { all_reduce(mesh, at::zeros({2}, at::kBool)); }, {"take the maximum"});
  expect_refused(2, [](const Mesh& mesh) { static_cast<void>(mean_over_ranks(mesh, 1.0, mesh.rank() ? -1 : 1)); },
                 {"rank 1", "got -1"});
  expect_refused(2, [](const Mesh& mesh) { static_cast<void>(mean_over_ranks(mesh, 1.0, 0)); },
                 {"a count of 0 by every rank"});
}

TEST(UserCollectives, CallsBetweenEngineCallsChangeNoBits) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Placed& placed : kOnePerPlacement) {
      SCOPED_TRACE(name_of(placed));
      const Strategy strategy = strategy_for(placed);
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        std::vector<Values> ends;
        for (const bool talks : {false, true}) {
          Session session(mesh, strategy);
          for (std::size_t step = 0; step < 3; ++step) {
            const at::Tensor loss = session.loss(step);
            if (talks) static_cast<void>(mean_over_ranks(mesh, loss.item<double>(), 4));
            session.engine.backward(loss);
            if (talks) all_reduce(mesh, at::zeros({20'000}));
            const StepResult result = session.engine.step();
            // The Engine's loss is the mean over ranks.
            if (talks) {
              EXPECT_NEAR(mean_over_ranks(mesh, loss.item<double>()), result.loss, 1e-6);
            }
          }
          ends.push_back(session.values());
        }
        EXPECT_TRUE(all_same_bits(ends[0], ends[1]));
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
