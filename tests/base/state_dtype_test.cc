// Tests the bytes of optimizer states and masters.

#include "runtime/base/state_dtype.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(StateBytes, EightBitStatesAddOneScalePerBlock) {
  EXPECT_EQ(state_bytes(StateDType::kF32, 1000).total(), 4000);
  EXPECT_EQ(state_bytes(StateDType::kBF16, 1000).total(), 2000);
  const StateBytes eight = state_bytes(StateDType::k8Bit, 1000);
  EXPECT_EQ(eight.data, 1000);
  EXPECT_EQ(eight.scales, 4 * 4);  // the fourth block has 232 elements
  EXPECT_EQ(state_bytes(StateDType::k8Bit, 1024).scales, 4 * 4);
  EXPECT_EQ(state_bytes(StateDType::k8Bit, 1025).scales, 5 * 4);
  for (StateDType dtype : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    EXPECT_EQ(state_bytes(dtype, 0).total(), 0);
  }
}

TEST(MasterBytes, AreOnlyTheBytesThatTheParameterLacks) {
  EXPECT_EQ(master_bytes(MasterKind::kSplitBF16, DType::kF32, 100), 0);
  EXPECT_EQ(master_bytes(MasterKind::kF32, DType::kF32, 100), 0);
  EXPECT_EQ(master_bytes(MasterKind::kSplitBF16, DType::kBF16, 100), 200);
  EXPECT_EQ(master_bytes(MasterKind::kF32, DType::kBF16, 100), 400);
  EXPECT_EQ(master_bytes(MasterKind::kSplitBF16, DType::kF16, 100), 400);
  EXPECT_EQ(master_kind_of(MasterKind::kSplitBF16, DType::kF16), MasterKind::kF32);
}

}  // namespace
}  // namespace tessera
