// Tests which tensors are sent as low-rank factors, where these factors lie, and which groups a method of compression
// refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/method_layout.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Returns a group of a vector, a matrix, a small matrix, and another matrix.
GroupShape some_group() {
  GroupShape group;
  group.layout = Layout::pack(std::vector<std::int64_t>{40, 600, 12, 300}, 2);
  group.factored = {{}, {20, 30}, {3, 4}, {30, 10}};
  return group;
}

TEST(FactorLayout, FactorsOnlyTensorsThatGetShorter) {
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
  const MethodMemory memory = method_layout(PowerSgdConfig{.rank = 2}, group, 3).memory;
  EXPECT_EQ(memory.kept, 912 + 80);
  EXPECT_EQ(memory.work, 160);
}

TEST(FactorLayout, NeedsNoMemoryWhereNothingIsFactored) {
  const GroupShape group = some_group();
  EXPECT_EQ(FactorLayout(group, 12).first_numel(), 40 + 600 + 12 + 300);
  const MethodLayout plain = method_layout(PowerSgdConfig{.rank = 12}, group, 3);
  EXPECT_EQ(plain.memory.kept, 0);
  EXPECT_EQ(plain.memory.work, 0);
  EXPECT_TRUE(plain.messages.empty());
}

TEST(FactorLayout, TopKCountIsRoundedUp) {
  const GroupShape group = some_group();  // the group has 952 elements
  EXPECT_EQ(count_of(group, 1), 952);
  EXPECT_EQ(count_of(group, 0.01), 10);
  EXPECT_EQ(count_of(group, 1e-9), 1);
  const MethodMemory memory = method_layout(TopKConfig{.fraction = 0.01}, group, 3).memory;
  EXPECT_EQ(memory.work, 80);
  EXPECT_EQ(memory.kept, group.layout.numel());
}

TEST(GradientMethod, GroupTooLongForShortIndicesIsRefused) {
  GroupShape group;
  group.layout = Layout::pack(std::vector<std::int64_t>{std::int64_t{1} << 32}, 2);
  const std::int64_t numbers[] = {0};
  for (const CompressionMethod& method : {CompressionMethod(TopKConfig()), CompressionMethod(RandomKConfig())}) {
    const MadeMethod made = make_gradient_method(method, {group, numbers});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(exit_code_of(made.status()), ExitCode::kConfig);
    EXPECT_THAT(message_of(made.status()), HasSubstr("has indices of 32 bits"));
  }
}

TEST(GradientMethod, TypesWithoutSumsOfTheirOwnMakeNone) {
  const GroupShape group = some_group();
  const std::int64_t numbers[] = {0, 1, 2, 3};
  for (const CompressionMethod& method : {CompressionMethod(NoMethodConfig()), CompressionMethod(CommHookConfig())}) {
    EXPECT_TRUE(method_layout(method, group, 2).messages.empty());
    EXPECT_EQ(*make_gradient_method(method, {group, numbers}), nullptr);
  }
}

}  // namespace
}  // namespace tessera
