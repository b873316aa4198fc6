// Tests the benchmark of the optimizer.

#include "workshop/bench/optimizer_bench.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

TEST(OptimizerBench, EveryFormatIsTimedWithItsBytes) {
  const auto timings = bench_optimizer(1000, 3);  // 1000 elements, padded to 1024 in the last block
  std::vector<std::string> names;
  std::vector<double> bytes_of_parameter;
  for (const PassTiming& timing : timings) {
    EXPECT_EQ(timing.numel, 1024u);
    EXPECT_EQ(timing.pass.ns.size(), 3u);
    EXPECT_EQ(timing.limit.ns.size(), 3u);
    names.push_back(timing.name);
    bytes_of_parameter.push_back(static_cast<double>(timing.bytes) / 1024);
  }
  EXPECT_THAT(names, ::testing::ElementsAre("fp32", "mixed", "mixed_bf16_moments", "mixed_8bit_moments",
                                            "fp32_bf16_moments", "fp32_8bit_moments"));
  // A step reads g, p, m and v, and writes p, m and v. A norm reads g once more. 8-bit states have one byte each, and 4
  // more bytes for every 256 elements.
  EXPECT_THAT(bytes_of_parameter, ::testing::ElementsAre(28, 32, 24, 20 + 16.0 / 256, 20, 16 + 16.0 / 256));
}

TEST(OptimizerBench, JsonHasTheKeysThatTheRunnerReads) {
  const nlohmann::json json = to_json(bench_optimizer(256, 2));
  for (const auto& each : json.at("cases")) {
    EXPECT_EQ(each.at("samples_s").size(), 2u);
    EXPECT_EQ(each.at("numel"), 256);
    EXPECT_GT(each.at("limit_s"), 0.0);
    EXPECT_TRUE(each.at("name").is_string());
  }
}

}  // namespace
}  // namespace tessera
