// Tests `tessera bench step | memory | overhead | times | launches | overlap | collectives --fit`, as a user runs them.

#include <gmock/gmock.h>

#include <filesystem>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace bench_tables_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BenchTables : public Workplace {
 protected:
  /// Runs a section and returns its JSON, which has a row for each thing that is measured.
  json bench(const std::string& section) const {
    run({TESSERA_PROGRAM, "bench", section, "--quick", "--json", path("out.json")});
    return json::parse(read_file(path("out.json")));
  }
};

json cell(const json& table, const std::string& row_name, const std::string& column) {
  const auto& columns = table.at("columns");
  const auto at = std::find(columns.begin(), columns.end(), column) - columns.begin();
  for (const json& row : table.at("rows")) {
    if (row.at(0) == row_name) return row.at(static_cast<std::size_t>(at));
  }
  ADD_FAILURE() << "no row " << row_name;
  return nullptr;
}

std::vector<std::string> names(const json& table) {
  std::vector<std::string> names;
  for (const json& row : table.at("rows")) names.push_back(row.at(0));
  return names;
}

TEST_F(BenchTables, StepTableComparesStrategiesWithNoCommunication) {
  const json table = bench("step");
  EXPECT_THAT(names(table), ElementsAre("no communication", "NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS",
                                        "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD, private copies"));
  EXPECT_TRUE(cell(table, "no communication", "exposed_s").is_null());
  for (const std::string& name : names(table)) {
    const double step = cell(table, name, "median_s"), forward = cell(table, name, "forward_s");
    EXPECT_GT(step, 0) << name;
    EXPECT_GT(forward, 0) << name;
    EXPECT_LE(cell(table, name, "p10_s").get<double>(), step) << name;
    EXPECT_GE(cell(table, name, "p90_s").get<double>(), step) << name;
    if (name == "no communication") continue;
    EXPECT_DOUBLE_EQ(cell(table, name, "exposed_s").get<double>(),
                     step - cell(table, "no communication", "median_s").get<double>());
    EXPECT_GT(cell(table, name, "communication_s").get<double>(), 0) << name;
  }
}

TEST_F(BenchTables, LaunchesTableComparesStrategiesWithThePlainModule) {
  const json table = bench("launches");
  EXPECT_THAT(names(table), ElementsAre("plain module", "NO_SHARD", "SHARD_GRADIENTS", "FULL_SHARD"));
  const double plain = cell(table, "plain module", "step_s");
  EXPECT_GT(plain, 0);
  EXPECT_TRUE(cell(table, "plain module", "over_plain_s").is_null());
  const double over = cell(table, "FULL_SHARD", "over_plain_s"),
               of_unit = cell(table, "FULL_SHARD", "over_plain_unit_s");
  EXPECT_DOUBLE_EQ(of_unit, over / 3);  // the model has three units: two blocks and the root
  EXPECT_LE(cell(table, "FULL_SHARD", "over_plain_unit_p10_s").get<double>(), of_unit);
  EXPECT_GE(cell(table, "FULL_SHARD", "over_plain_unit_p90_s").get<double>(), of_unit);
}

TEST_F(BenchTables, MemoryTableEqualsThePlan) {
  const json table = bench("memory");
  EXPECT_EQ(names(table).size(), 6u);
  for (const std::string& name : names(table)) {
    const double planned = cell(table, name, "planned_bytes"), measured = cell(table, name, "measured_bytes");
    EXPECT_EQ(cell(table, name, "allocated_bytes"), planned) << name;
    // The kernel counts whole pages, and the libraries take some pages too. Half a MiB is allowed for both.
    EXPECT_GE(measured, 0.98 * planned) << name;
    EXPECT_LE(measured, planned + (1 << 19)) << name;
  }
  const double parameters = cell(table, "NO_SHARD", "formula_bytes").get<double>() / 16;
  EXPECT_EQ(cell(table, "FULL_SHARD", "formula_bytes"), 8 * parameters);
  EXPECT_EQ(cell(table, "SHARD_GRADIENTS", "formula_bytes"), 10 * parameters);
}

TEST_F(BenchTables, OverheadTableComparesWithThePlainModule) {
  const json table = bench("overhead");
  EXPECT_EQ(names(table).size(), 14u);
  EXPECT_EQ(cell(table, "plain module", "over_plain_s"), 0.0);
  for (const std::string& name : names(table)) EXPECT_GT(cell(table, name, "median_s").get<double>(), 0) << name;
}

TEST_F(BenchTables, TimesTableComparesWithNothingTold) {
  const json table = bench("times");
  const std::string model = "2 layers of width 64", copies = model + ", private copies";
  std::vector<std::string> wanted;
  for (const std::string& of : {model, copies}) {
    for (const char* turn : {"nothing told", "nothing told, another", "ranges", "all", "all, with a profiler"})
      wanted.push_back(of + ": " + turn);
  }
  EXPECT_EQ(names(table), wanted);
  EXPECT_EQ(cell(table, model + ": nothing told", "over_plain_fraction"), 0.0);
  for (const std::string& name : names(table)) {
    const auto number = [&](const char* column) { return cell(table, name, column).get<double>(); };
    EXPECT_GT(number("p10_s"), 0) << name;
    EXPECT_LE(number("p10_s"), number("median_s")) << name;
    EXPECT_LE(number("median_s"), number("p90_s")) << name;
  }
}

TEST_F(BenchTables, OverlapTableComparesExposedAndWholeCommunication) {
  const json table = bench("overlap");
  EXPECT_THAT(names(table), ElementsAre("NO_SHARD", "NO_SHARD, reductions_ahead 0", "SHARD_OPTIMIZER",
                                        "SHARD_GRADIENTS", "FULL_SHARD", "FULL_SHARD, reductions_ahead 0"));
  for (const std::string& name : names(table)) {
    const auto seconds = [&](const char* column) { return cell(table, name, column).get<double>(); };
    EXPECT_GE(seconds("step_s"), seconds("compute_s")) << name;
    EXPECT_GE(seconds("alone_step_s"), seconds("compute_s")) << name;
    EXPECT_DOUBLE_EQ(seconds("exposed_s"), seconds("step_s") - seconds("alone_step_s")) << name;
    EXPECT_DOUBLE_EQ(seconds("wire_s"), seconds("bare_step_s") - seconds("alone_bare_step_s")) << name;
  }
}

TEST_F(BenchTables, FitOfCollectivesIsWrittenAndUsedByTraining) {
  run({TESSERA_PROGRAM, "bench", "collectives", "--fit", "--quick", "--ranks", "3", "--json", path("out.json"),
       "--fit-file", path("fit.json")});
  const json report = json::parse(read_file(path("out.json"))), fit = json::parse(read_file(path("fit.json")));
  EXPECT_EQ(report.at("transport"), "gloo");
  EXPECT_EQ(report.at("ranks"), 3);
  EXPECT_EQ(report.at("fit"), fit);
  int chosen = 0;
  for (const json& call : report.at("calls")) chosen += call.at("is_chosen").get<bool>() ? 1 : 0;
  EXPECT_EQ(chosen, 4 * 5) << "sizes, collectives";

  // Algorithms change only the time: losses have the same bits, even on three ranks, a number that is no power of two.
  const auto train_by = [&](const std::string& fit) {
    const std::string three =
        strategy("FULL_SHARD", R"(, "comm": {"transport": "gloo", "network_fit": ")" + fit + R"("})");
    return launch(3) + train(three, std::filesystem::path(fit).filename().string() + " metrics");
  };
  run(train_by("direct"));
  EXPECT_EQ(losses("direct metrics").size(), 3u);
  write_file(path("few messages"), R"({"round_s": 0, "message_s": 1, "byte_s": 0, "add_s": 0})");
  run(train_by(path("few messages")));
  EXPECT_EQ(losses("few messages metrics"), losses("direct metrics"));
  const Ended measured = run(train_by("measured"));
  EXPECT_EQ(losses("measured metrics"), losses("direct metrics"));
  EXPECT_THAT(measured.err, AllOf(HasSubstr("[0,1,2]: measured: a round costs"), HasSubstr("a GB")));
  write_file(path("wrong"), R"({"round_s": 0, "message_s": -1, "byte_s": 0})");
  const Ended ended = run_program(train_by(path("wrong")), path("run"));
  EXPECT_EQ(ended.code, 65) << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("message_s"), HasSubstr("add_s")));
}

TEST_F(BenchTables, DifferentNetworkFitsOnRanksAreRefused) {
  const auto transport = [](const std::string& fit) {
    return R"(, "comm": {"transport": "gloo", "network_fit": ")" + fit + R"("})";
  };
  std::filesystem::rename(strategy("FULL_SHARD", transport("measured")), path("0.json"));
  std::filesystem::rename(strategy("FULL_SHARD", transport("")), path("1.json"));
  std::string command = "exec";
  for (const std::string& word : train(path("$RANK.json"), "metrics")) command += " " + word;
  // Rank 0 measures, and waits for rank 1 until the launcher ends rank 0.
  const Ended ended = run_program(launch(2, {"--grace", "1"}) + Words{"sh", "-c", command}, path("run"));
  EXPECT_EQ(ended.code, 78) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr(R"(comm.network_fit is "" here, and "measured" on rank 0)"));
}

TEST_F(BenchTables, TablesOfOneRankAreRefused) {
  for (const std::string section : {"step", "memory", "overhead", "times", "overlap"}) {
    const Ended ended = run_program({TESSERA_PROGRAM, "bench", section, "--quick", "--ranks", "1"}, path("run"));
    EXPECT_EQ(ended.code, 64) << section;
    EXPECT_THAT(ended.err, HasSubstr("wants 2 ranks or more"));
  }
}

}  // namespace bench_tables_test
}  // namespace tessera::testing
