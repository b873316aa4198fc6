// Tests the benchmark of collectives and of memory traffic.

#include "workshop/bench/collectives_bench.h"

#include <gmock/gmock.h>

#include <set>
#include <tuple>

#include "runtime/base/status.h"
#include "runtime/comm/shared/run_ranks.h"
#include "workshop/bench/memory_traffic.h"

namespace tessera {
namespace {

CollectivesBenchOptions small_options() {
  CollectivesBenchOptions options;
  options.bytes = {4, 1000, 100'000};
  options.rounds = 2;
  options.round_bytes = 300'000;
  options.most_calls = 5;
  return options;
}

/// Returns the reports of all ranks, as JSON.
std::vector<nlohmann::json> reports_of(const ThreadRanks& ranks) {
  std::vector<nlohmann::json> reports(ranks.ranks);
  run_ranks(ranks, [&](const Mesh& mesh) {
    auto report = bench_collectives(mesh, small_options());
    if (!report.ok()) throw std::runtime_error(message_of(report.status()));
    reports[mesh.rank()] = to_json(*report);
  });
  return reports;
}

TEST(CollectivesBench, MeasuresEveryCaseAndAllRanksReportTheSame) {
  const auto reports = reports_of({.ranks = 2});
  EXPECT_EQ(reports[0], reports[1]);
  const nlohmann::json& report = reports[0];
  EXPECT_EQ(report["transport"], "thread");
  EXPECT_EQ(report["ranks"], 2);
  // A reduce_scatter of 4 bytes of fp32 has fewer elements than ranks.
  const std::size_t of_four_bytes = 2 * (3 + 1 + 2) + 1, of_more = 2 * (3 + 4) + 1;
  EXPECT_EQ(report["cases"].size(), 1 + of_four_bytes + 2 * of_more);
  std::set<std::tuple<std::string, std::string, std::string, std::size_t>> seen;
  for (const auto& one : report["cases"]) {
    EXPECT_TRUE(seen.emplace(one["operation"], one["dtype"], one["memory"], one["bytes"]).second) << one;
    EXPECT_EQ(one["calls"], one["bytes"] == 100'000 ? 2 * 3 : 2 * 5) << one;
    EXPECT_EQ(one["samples_ns"].size(), one["calls"]) << one;
    EXPECT_GT(one["median_s"], 0) << one;
    EXPECT_LE(one["p10_s"], one["median_s"]) << one;
    EXPECT_LE(one["median_s"], one["p90_s"]) << one;
    const bool moves = one["operation"] != "barrier" && one["memory"] != "common" && one["bytes"] >= 1000;
    EXPECT_EQ(one["limit_s"].is_number(), moves) << one;
  }
}

TEST(CollectivesBench, CommonMemoryIsLeftOutAcrossHosts) {
  const nlohmann::json report = reports_of({.ranks = 4, .hosts = 2})[0];
  EXPECT_EQ(report["transport"], "hierarchical(thread, thread)");
  for (const auto& one : report["cases"]) EXPECT_NE(one["memory"], "common");
}

TEST(MemoryTraffic, EveryLineIsReadAndWrittenOnce) {
  struct alignas(64) Streams {
    std::byte from[2][256], to[2][512];
  } streams{};
  for (int i = 0; i < 256; ++i) {
    streams.from[0][i] = static_cast<std::byte>(i);
    streams.from[1][i] = static_cast<std::byte>(3 * i);
  }
  const std::vector<const std::byte*> from = {streams.from[0], streams.from[1]};
  const std::vector<std::byte*> to = {streams.to[0], streams.to[1]};
  for (bool past_caches : {false, true}) {
    std::memset(streams.to, 0, sizeof streams.to);
    cause_traffic({2, 2, 256, 2}, from, to, past_caches);
    for (int i = 0; i < 512; ++i) {
      const int source = i / 128 * 64 + i % 64;  // each cache line of the input fills two of the output
      const auto expected = static_cast<std::byte>(source) ^ static_cast<std::byte>(3 * source);
      ASSERT_EQ(streams.to[0][i], expected) << i;
      ASSERT_EQ(streams.to[1][i], expected) << i;
    }
  }
}

}  // namespace
}  // namespace tessera
