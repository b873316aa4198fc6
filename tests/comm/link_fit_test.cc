// Tests the choice of an algorithm according to measured costs.

#include "runtime/comm/rounds/link_fit.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

struct Choice {
  Operation operation;
  int ranks;
  DType dtype;
  std::size_t bytes;
  Algorithm expected;
};

void expect_choices(const LinkFit& fit, const std::vector<Choice>& choices) {
  const ChooseAlgorithm remembers = choose_by(fit);
  for (const Choice& choice : choices) {
    const std::string call = std::string(name_of(choice.operation)) + " of " + std::to_string(choice.bytes) + " " +
                             std::string(name_of(choice.dtype)) + ", " + std::to_string(choice.ranks) + " ranks";
    const Algorithm chosen = choose(choice.operation, choice.ranks, choice.dtype, choice.bytes, fit);
    EXPECT_EQ(name_of(chosen), name_of(choice.expected)) << call;
    for (int time = 0; time < 2; ++time)
      EXPECT_EQ(remembers(choice.operation, choice.ranks, choice.dtype, choice.bytes), chosen) << call;
  }
}

// Rounds cost little and messages cost much, as if one core sends all messages. Algorithms with the fewest messages
// win, unless there are many bytes.
TEST(LinkFit, CostlyMessagesChooseAlgorithmsWithFewMessages) {
  const LinkFit fit{.round_s = 1e-6, .message_s = 20e-6, .byte_s = 1e-9, .add_s = 1e-10};
  expect_choices(fit, {
                          {Operation::kAllGather, 2, DType::kU8, 4 * kKiB, Algorithm::kDirect},  // all cost the same
                          {Operation::kAllGather, 16, DType::kU8, 256, Algorithm::kDoubling},
                          {Operation::kAllGather, 3, DType::kU8, 256, Algorithm::kDirect},
                          {Operation::kReduceScatter, 16, DType::kF32, 4 * kKiB, Algorithm::kHalving},
                          {Operation::kReduceScatter, 16, DType::kBF16, 8 * kMiB, Algorithm::kDirect},
                          {Operation::kAllReduce, 16, DType::kF32, 256, Algorithm::kDoubling},
                          {Operation::kAllReduce, 16, DType::kF32, 64 * kKiB, Algorithm::kHalving},
                          {Operation::kAllReduce, 4, DType::kF32, 64 * kKiB, Algorithm::kHalving},
                          {Operation::kAllReduce, 16, DType::kBF16, 64 * kMiB, Algorithm::kDirect},
                          {Operation::kBroadcast, 16, DType::kU8, 256, Algorithm::kDirect},
                          {Operation::kAllToAll, 16, DType::kU8, 256, Algorithm::kDirect},
                          {Operation::kAllReduce, 1, DType::kF32, 256, Algorithm::kDirect},
                          {Operation::kAllGather, 16, DType::kU8, 0, Algorithm::kDirect},
                      });
}

// Here rounds take most of the time, as between distant hosts. The direct algorithm has the fewest rounds. It
// sends all data to all ranks in all-reduces.
TEST(LinkFit, CostlyRoundsChooseAlgorithmsWithFewRounds) {
  const LinkFit fit{.round_s = 1e-3, .message_s = 0, .byte_s = 1e-8, .add_s = 0};
  expect_choices(fit, {
                          {Operation::kAllGather, 8, DType::kU8, kKiB, Algorithm::kDirect},
                          {Operation::kReduceScatter, 8, DType::kF32, kMiB, Algorithm::kDirect},
                          {Operation::kAllReduce, 8, DType::kF32, 64 * kKiB, Algorithm::kDirect},
                          {Operation::kAllReduce, 64, DType::kF32, 64 * kKiB, Algorithm::kHalving},
                          {Operation::kAllReduce, 64, DType::kF32, 8 * kKiB, Algorithm::kDirect},
                      });
}

// Partial sums are fp32, so halving sends up to twice the bytes for bf16. The size from which the
// direct algorithm is faster is therefore smaller for bf16 than for fp32.
TEST(LinkFit, WiderPartialSumsOfBf16CountInTheChoice) {
  const LinkFit fit{.round_s = 0, .message_s = 10e-6, .byte_s = 1e-9, .add_s = 0};
  expect_choices(fit, {
                          {Operation::kReduceScatter, 8, DType::kF32, 256 * kKiB, Algorithm::kHalving},
                          {Operation::kReduceScatter, 8, DType::kBF16, 256 * kKiB, Algorithm::kDirect},
                      });
}

TEST(LinkFit, EmptyFitChoosesTheDirectWay) {
  expect_choices({}, {
                         {Operation::kAllGather, 16, DType::kU8, 256, Algorithm::kDirect},
                         {Operation::kReduceScatter, 16, DType::kBF16, 256, Algorithm::kDirect},
                         {Operation::kAllReduce, 16, DType::kF32, 256, Algorithm::kDirect},
                     });
}

// The expected work was counted by hand, for 3 or 4 ranks and 1024 fp32 elements.
TEST(CallWork, CountsTheWorkOfTheBusiestRank) {
  const auto expect = [](Operation operation, Algorithm algorithm, int ranks, const CallWork& expected) {
    const CallWork work = work_of(operation, algorithm, ranks, DType::kF32, 4096);
    const std::string call = std::string(name_of(algorithm)) + " " + std::string(name_of(operation));
    EXPECT_EQ(work.rounds, expected.rounds) << call;
    EXPECT_EQ(work.messages, expected.messages) << call;
    EXPECT_EQ(work.bytes, expected.bytes) << call;
    EXPECT_EQ(work.adds, expected.adds) << call;
  };
  expect(Operation::kAllGather, Algorithm::kDirect, 4, {1, 3, 3 * 4096, 0});
  expect(Operation::kAllGather, Algorithm::kRing, 4, {3, 3, 3 * 4096, 0});
  expect(Operation::kAllGather, Algorithm::kDoubling, 4, {2, 3, 3 * 4096, 0});
  expect(Operation::kReduceScatter, Algorithm::kDirect, 4, {1, 3, 3 * 1024, 3 * 256});
  expect(Operation::kReduceScatter, Algorithm::kHalving, 4, {2, 2, 3 * 1024, 3 * 256});
  expect(Operation::kAllReduce, Algorithm::kDirect, 4, {1, 3, 3 * 4096, 3 * 1024});
  expect(Operation::kAllReduce, Algorithm::kDoubling, 4, {2, 3, 3 * 4096, 3 * 1024});
  expect(Operation::kAllReduce, Algorithm::kHalving, 4, {4, 4, 6 * 1024, 3 * 256});
  // Rank 2 alone is a binary block. It sends two halves and receives two. Ranks 0 and 1 also exchange halves, add
  // twice, and exchange sums.
  expect(Operation::kAllReduce, Algorithm::kHalving, 3, {4, 4, 4 * 2048, 2 * 512});
}

}  // namespace
}  // namespace tessera
