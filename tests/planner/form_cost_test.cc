// Tests the number of bytes of each wire form, and the predicted CPU time of gathers in each form.

#include "planner/script/form_cost.h"

#include <gtest/gtest.h>

#include "runtime/comm/sum/wire_codec.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

TEST(FormCost, LossyFormsHaveTheCodecsLength) {
  for (const WireForm form : {WireForm::kInt8, WireForm::kInt4}) {
    for (std::int64_t numel = 0; numel < 1100; ++numel)
      EXPECT_EQ(bytes_on_wire(form, DType::kF32, numel),
                static_cast<std::int64_t>(encoded_bytes(form, static_cast<std::size_t>(numel))));
  }
  EXPECT_EQ(bytes_on_wire(WireForm::kPlain, DType::kBF16, 100), 200);
}

/// The cost of coding depends on the number of elements, not on their width. It is 0 for the plain form, and for a
/// dtype that the form does not code.
TEST(FormCost, CodingTimeDependsOnElementsNotOnTheirWidth) {
  const CodingFit coding{.lossless_s_per_byte = 3, .int8_s_per_byte = 2, .int4_s_per_byte = 1};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    EXPECT_EQ(coding_seconds(coding, WireForm::kPlain, dtype, 10), 0);
    EXPECT_EQ(coding_seconds(coding, WireForm::kLossless, dtype, 10), 120);
    EXPECT_EQ(coding_seconds(coding, WireForm::kInt8, dtype, 10), 80);
    EXPECT_EQ(coding_seconds(coding, WireForm::kInt4, dtype, 10), 40);
  }
  EXPECT_EQ(coding_seconds(coding, WireForm::kLossless, DType::kF16, 10), 0);
  EXPECT_EQ(coding_seconds(coding, WireForm::kInt8, DType::kU8, 10), 0);
}

TEST(FormCost, GatherEncodesOnePartAndDecodesThoseOfTheOthers) {
  Links links = links_of(1e-9);
  links.coding.int8_s_per_byte = 1e-6;
  const CallCost of_two = all_gather_in(WireForm::kInt8, DType::kF32, 1024, links, 2);
  EXPECT_DOUBLE_EQ(of_two.coding_s, 4096 * 1e-6);
  EXPECT_DOUBLE_EQ(of_two.transfer_s, of_two.coding_s);
  EXPECT_EQ(of_two.sent_bytes, bytes_on_wire(WireForm::kInt8, DType::kF32, 1024));
  EXPECT_DOUBLE_EQ(all_gather_in(WireForm::kInt8, DType::kF32, 1024, links, 6).coding_s, 3 * 4096 * 1e-6);
  links.hosts = 2;
  EXPECT_DOUBLE_EQ(all_gather_in(WireForm::kInt8, DType::kF32, 1024, links.of_group(6, 2, 1), 6).coding_s, 4096 * 1e-6);
  EXPECT_EQ(all_gather_in(WireForm::kPlain, DType::kF32, 1024, links, 2).coding_s, 0);
  EXPECT_EQ(all_gather_in(WireForm::kInt8, DType::kF32, 1024, links, 1).seconds(), 0);
}

}  // namespace
}  // namespace tessera::testing
