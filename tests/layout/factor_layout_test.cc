// Tests which tensors go as low-rank factors, and where these lie.

#include "sharding/layout/factor_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;

/// A group of a vector, a matrix, a small matrix, and another matrix.
GroupShape some_group() {
  GroupShape group;
  group.layout = Layout::pack(std::vector<std::int64_t>{40, 600, 12, 300}, 2);
  group.factored = {{}, {20, 30}, {3, 4}, {30, 10}};
  return group;
}

TEST(FactorLayout, CutsWhatIsShorterAsFactors) {
  const GroupShape group = some_group();
  const FactorLayout layout(group, 2);
  ASSERT_EQ(layout.tensors().size(), 2u);
  const FactoredTensor &first = layout.tensors()[0], &second = layout.tensors()[1];
  EXPECT_EQ(first.tensor, 1u);
  EXPECT_EQ(first.offset, group.layout.extent(1).offset);
  EXPECT_EQ(first.kept, 0);
  EXPECT_EQ(first.left, 0);
  EXPECT_EQ(first.right, 0);
  EXPECT_EQ(second.tensor, 3u);
  EXPECT_EQ(second.kept, 600);
  EXPECT_EQ(second.left, 20 * 2);
  EXPECT_EQ(second.right, 30 * 2);
  EXPECT_THAT(layout.plain(), ElementsAre(group.layout.extent(0), group.layout.extent(2)));
  EXPECT_EQ(layout.plain_begin(), (20 + 30) * 2);
  EXPECT_EQ(layout.first_numel(), (20 + 30) * 2 + 40 + 12);
  EXPECT_EQ(layout.second_numel(), (30 + 10) * 2);
  EXPECT_EQ(layout.kept_numel(), 900);
  EXPECT_EQ(layout.second_begin(), 912);
  const MethodMemory memory = power_sgd_memory(group, 2);
  EXPECT_EQ(memory.kept, 912 + 80);
  EXPECT_EQ(memory.work, 160);
}

TEST(FactorLayout, NeedsNothingWhereAllGoesAsItIs) {
  const GroupShape group = some_group();
  EXPECT_EQ(FactorLayout(group, 12).first_numel(), 40 + 600 + 12 + 300);
  EXPECT_EQ(power_sgd_memory(group, 12).kept, 0);
  EXPECT_EQ(power_sgd_memory(group, 12).work, 0);
}

TEST(FactorLayout, CountsTheLargestRoundedUp) {
  const GroupShape group = some_group();  // 952 elements
  EXPECT_EQ(count_of_largest(group, 1), 952);
  EXPECT_EQ(count_of_largest(group, 0.01), 10);
  EXPECT_EQ(count_of_largest(group, 1e-9), 1);
  EXPECT_EQ(top_k_memory(group, 0.01, 3).work, 80);
  EXPECT_EQ(top_k_memory(group, 0.01, 3).kept, group.layout.numel());
}

}  // namespace
}  // namespace tessera
