// Tests the benchmark of collective algorithms.

#include "workshop/bench/algorithms_bench.h"

#include <gtest/gtest.h>

#include <set>

#include "runtime/base/status.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera {
namespace {

// Ranks on threads have no choice of algorithms. No call uses the chosen algorithm, but the report names it.
TEST(AlgorithmsBench, EveryAlgorithmIsTimedWithOneChosenAndOneFastest) {
  run_ranks({.ranks = 4}, [](const Mesh& mesh) {
    auto axes = groups_of(mesh).axes(1, 4);
    ASSERT_TRUE(axes.ok());
    std::set<Algorithm> used;
    const auto report = bench_algorithms(*axes->world, [&](Algorithm algorithm) { used.insert(algorithm); },
                                         {.bytes = {64, 1 << 20}, .rounds = 2, .most_calls = 3});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(used.size(), 4u);
    EXPECT_EQ(report->ranks, 4);
    // Each size is measured with 3 algorithms of all_gather. It is also measured in each of 2 dtypes with 2 algorithms
    // of reduce_scatter and 3 of all_reduce. Doubling is missing for many bytes, since no all_reduce of many bytes uses
    // it.
    EXPECT_EQ(report->timings.size(), 13u + 11u);
    int chosen = 0, fastest = 0;
    for (const TimedAlgorithm& timing : report->timings) {
      EXPECT_EQ(timing.call.ns.size(), 6u);
      EXPECT_GT(timing.by_fit_s, 0);
      chosen += timing.is_chosen ? 1 : 0;
      fastest += timing.is_fastest ? 1 : 0;
    }
    EXPECT_EQ(chosen, 2 * 5);
    EXPECT_EQ(fastest, 2 * 5);
    for (const double ratio : report->chosen_of_fastest()) EXPECT_GE(ratio, 1);
    const nlohmann::json json = to_json(*report);
    EXPECT_EQ(json.at("calls").size(), report->timings.size());
    EXPECT_EQ(json.at("fit").at("byte_s"), report->fit.byte_s);
  });
}

}  // namespace
}  // namespace tessera
