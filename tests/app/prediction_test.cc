// Tests the files that `tessera train --profile` and `tessera doctor --links` write, and the predictions that `plan`
// and `simulate` make from these files. Measured times are not compared. Only numbers that follow exactly from other
// numbers are compared.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/workplace.h"
#include "workshop/bench/number_text.h"

namespace tessera::testing {
namespace prediction_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Prediction : public Workplace {
 protected:
  Ended fail(const Words& command) const { return run_program(command, path("run")); }
  json file(const std::string& name) const { return json::parse(read_file(path(name))); }
  /// Writes the profile and the links that the commands of `world` need. They are measured once for all tests.
  void measure() const {
    static std::string profile, links_file;
    if (!links_file.empty()) {
      write_file(path("profile.json"), profile);
      write_file(path("links.json"), links_file);
      return;
    }
    run(train(strategy("FULL_SHARD"), "alone.jsonl", {"--profile", path("profile.json"), "--steps", "4"}));
    const Ended links =
        run(launch(2) + Words{TESSERA_PROGRAM, "doctor", "--links", path("links.json"), "--transport", "gloo"});
    // The table shows the bytes of each codec as a share of the bytes of fp32.
    EXPECT_THAT(links.out,
                AllOf(ContainsRegex("lossless +0.85"), ContainsRegex("int8 +0.254"), ContainsRegex("int4 +0.129")));
    profile = read_file(path("profile.json"));
    links_file = read_file(path("links.json"));
  }
  /// Returns a command for a world of `ranks` hosts with one rank each, or of `hosts` hosts.
  Words world(const std::string& command, const std::string& strategy_file, const std::string& ranks,
              const Words& more = {}, const std::string& hosts = "") const {
    return Words{TESSERA_PROGRAM, command,
                 "--model",       path("model.json"),
                 "--strategy",    strategy_file,
                 "--world-size",  ranks,
                 "--hosts",       hosts.empty() ? ranks : hosts,
                 "--links",       path("links.json"),
                 "--profile",     path("profile.json")} +
           more;
  }
};

TEST_F(Prediction, MeasuredProfileAndLinksPredictAndSimulate) {
  measure();
  const json profile = file("profile.json"), links = file("links.json");
  std::set<std::string> units;
  double work = profile.at("rest_s").get<double>() + profile.at("update").at("seconds").get<double>();
  for (const json& entry : profile.at("entries")) {
    units.insert(entry.at("unit").get<std::string>());
    EXPECT_GT(entry.at("seconds").get<double>(), 0);
    work += 2 * entry.at("seconds").get<double>();  // a step has two microbatches
  }
  const json alone = json::parse(run(world("plan", strategy("NO_SHARD"), "1", {"--json"})).out);
  std::set<std::string> planned;
  for (const json& unit : alone.at("units")) planned.insert(unit.at("name").get<std::string>());
  EXPECT_EQ(units, planned);
  EXPECT_NEAR(alone.at("step").at("seconds").get<double>(), work, 1e-6);

  EXPECT_EQ(links.at("ranks"), 2);
  EXPECT_EQ(links.at("transport"), "gloo");
  for (const char* operation : {"all_gather", "reduce_scatter", "all_reduce"})
    EXPECT_GT(links.at(operation).at("busy_beta_s_per_byte").get<double>() +
                  links.at(operation).at("busy_alpha_s").get<double>(),
              0);
  EXPECT_GT(links.at("coding").at("int8_s_per_byte").get<double>(), 0);
  for (const char* kind : {"NO_SHARD", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD"}) {
    const json plan = json::parse(run(world("plan", strategy(kind), "2", {"--json"})).out);
    const json& step = plan.at("step");
    EXPECT_EQ(step.at("shard").at("sent_bytes"), plan.at("wire_bytes_of_a_rank")) << kind;
    EXPECT_GT(step.at("seconds").get<double>(), step.at("compute_s").get<double>()) << kind;
  }
  const Ended table = run(world("plan", strategy("FULL_SHARD"), "2"));
  EXPECT_THAT(table.out, AllOf(HasSubstr("forward and backward"), HasSubstr("what bounds it: ")));

  // A run on two ranks shows the prediction together with the measured time.
  const Ended beside = run(launch(2) + train(strategy("FULL_SHARD"), "two.jsonl",
                                             {"--predict-links", path("links.json"), "--predict-profile",
                                              path("profile.json"), "--steps", "2", "--show", "share"}));
  EXPECT_THAT(beside.out, AllOf(HasSubstr(", predicted "), ContainsRegex("of 2, measured [0-9.]+ ")));
  EXPECT_EQ(steps("two.jsonl").size(), 2u);
  for (const json& step : steps("two.jsonl")) {  // `work` is the seconds of one rank's step
    const double efficiency = step.at("measured_efficiency").get<double>();
    EXPECT_NEAR(efficiency * step.at("seconds").get<double>(), work, 1e-6) << step;
    EXPECT_DOUBLE_EQ(step.at("measured_speedup").get<double>(), 2 * efficiency) << step;
  }

  const Ended many =
      run(world("simulate", strategy("FULL_SHARD"), "64",
                {"--jitter", "0.1", "--straggler", "3=2", "--steps", "3", "--trace", path("trace.json")}));
  EXPECT_THAT(many.out, AllOf(HasSubstr("64 ranks, 3 steps"), HasSubstr("ranks that are alike")));
  EXPECT_GT(file("trace.json").at("traceEvents").size(), 100u);
}

// The share s and the efficiency of each number of ranks equal those of a separate plan, and follow Gustafson's law.
TEST_F(Prediction, EfficiencyOf1To4096RanksFollowsFromTheirPlans) {
  measure();
  const json plan = json::parse(run(world("plan", strategy("FULL_SHARD"), "3", {"--json"})).out);
  std::vector<int> ranks;
  for (const json& each : plan.at("scaling")) ranks.push_back(each.at("ranks").get<int>());
  EXPECT_EQ(ranks, (std::vector<int>{1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}));
  const json& one = plan.at("scaling").at(0);
  EXPECT_EQ(one.at("communication_share"), 0);
  EXPECT_EQ(one.at("scaling_efficiency"), 1);
  EXPECT_EQ(one.at("efficiency_beside_one_rank"), 1);
  for (const json& each : plan.at("scaling")) {
    const double s = each.at("communication_share").get<double>(), p = each.at("ranks").get<double>();
    EXPECT_DOUBLE_EQ(each.at("scaled_speedup").get<double>(), p - s * (p - 1)) << each;
    EXPECT_DOUBLE_EQ(each.at("scaling_efficiency").get<double>(), (p - s * (p - 1)) / p) << each;
    EXPECT_DOUBLE_EQ(each.at("efficiency_beside_one_rank").get<double>(),
                     one.at("seconds").get<double>() / each.at("seconds").get<double>());
    EXPECT_EQ(each.at("hosts"), each.at("ranks")) << "one rank a host, as asked";
  }
  const json& three = plan.at("scaling").at(2);
  const json& step = plan.at("step");
  double waited = 0;
  for (const char* part : {"exposed_gather_s", "exposed_reduction_s", "exposed_publish_s", "agreement_s"})
    waited += step.at(part).get<double>();
  EXPECT_EQ(three.at("seconds"), step.at("seconds"));
  EXPECT_NEAR(three.at("communication_share").get<double>(), waited / step.at("seconds").get<double>(), 1e-12);
  const json sixteen = json::parse(run(world("plan", strategy("FULL_SHARD"), "16", {"--json"})).out);
  EXPECT_EQ(plan.at("scaling").at(5).at("seconds"), sixteen.at("step").at("seconds"));

  EXPECT_THAT(run(world("plan", strategy("FULL_SHARD"), "2")).out, HasSubstr("scaled speed-up"));
  const Ended simulated = run(world("simulate", strategy("FULL_SHARD"), "4", {"--straggler", "1=4", "--steps", "2"}));
  EXPECT_THAT(simulated.out, AllOf(HasSubstr("scaled speed-up"), ContainsRegex("not alike: [0-9.]+ % beside one")));
  write_file(path("like.json"), R"({"units": {"classes": ["Block"]}})");
  const Ended chosen = run(world("plan", "auto", "2", {"--like", path("like.json")}));
  EXPECT_THAT(chosen.out, HasSubstr("scaled speed-up"));
  const json tried = json::parse(run(world("plan", "auto", "2", {"--like", path("like.json"), "--json"})).out);
  EXPECT_EQ(tried.at(0).at("scaling").size(), 13u);
}

TEST_F(Prediction, RanksWithClocksOfTheirOwnArePlannedAndSimulated) {
  measure();
  const auto with = [&](const std::string& more) {
    write_file(path("mode.json"), R"({"units": {"classes": ["Block"]}, )" + more + "}");
    return path("mode.json");
  };
  const auto with_sync = [&](const std::string& sync) {
    return with(R"("strategy": "SHARD_OPTIMIZER", "gradient_sync": "last_microbatch", "sync": )" + sync);
  };
  const std::string free = with_sync(R"({"type": "asynchronous", "delay_compensation": {"lambda": 0.1}})");
  const json step = json::parse(run(world("plan", free, "4", {"--json"}, "1")).out).at("step");
  EXPECT_NEAR(step.at("seconds").get<double>(),
              step.at("compute_s").get<double>() + step.at("pull_s").get<double>() + step.at("push_s").get<double>(),
              1e-9);
  EXPECT_GT(step.at("staleness_mean").get<double>(), 0);
  EXPECT_GE(step.at("not_counted").size(), 2u);

  const Words slow = {"--straggler", "3=4",     "--stall",          "0.1=0.01",   "--steps",
                      "20",          "--trace", path("modes.json"), "--overwrite"};
  const auto simulated = [&](const std::string& file) { return run(world("simulate", file, "4", slow, "1")).out; };
  const std::string bounded = R"({"type": "asynchronous", "max_staleness": 2})";
  EXPECT_THAT(simulated(with_sync(bounded)),
              AllOf(HasSubstr("asynchronous, 4 ranks, 20 steps"), HasSubstr("staleness of these ranks: mean "),
                    ContainsRegex("synchronous ranks [a-z ]+: [0-9.]+ s a step, [0-9.]+ times as long")));
  EXPECT_GT(file("modes.json").at("traceEvents").size(), 80u);
  const std::string backups = R"({"type": "backups", "count": 1})";
  EXPECT_THAT(simulated(with_sync(backups)),
              AllOf(HasSubstr(", meeting "), ContainsRegex("gradients that came too late: [1-9]")));
  const std::string local = R"("strategy": "NO_SHARD", "mesh": {"replicate": 2, "shard": 2},
                               "sync": {"type": "local_sgd", "every": 25})";
  EXPECT_THAT(simulated(with(local)), AllOf(HasSubstr("local_sgd, 2 replicas, 25 steps"),
                                            HasSubstr("gradients of a rank that count: 25 to 25")))
      << "a run ends with a meeting";
  const std::string streaming = R"("strategy": "NO_SHARD", "mesh": {"replicate": 2, "shard": 2},
                                   "sync": {"type": "streaming_diloco", "every": 8, "fragments": 2})";
  EXPECT_THAT(simulated(with(streaming)), AllOf(HasSubstr("streaming_diloco, 2 replicas, 24 steps"),
                                                HasSubstr("gradients of a rank that count: 24 to 24")));
  const std::string deal = R"("strategy": "SHARD_GRADIENTS", "gradient_accumulation": 4,
                              "gradient_sync": "last_microbatch", "deal": {"by": "speed"})";
  EXPECT_THAT(run(world("simulate", with(deal), "2", {"--straggler", "1=3"})).out,
              HasSubstr("dealt by speed: a rank computes 2 to 6 microbatches"));
}

// Each rank of `tessera train` makes the steps that the order has for it. Rank 0 writes the metrics.
TEST_F(Prediction, SimulatedOrderIsPlayedWithItsStepsAndAges) {
  measure();
  const auto with_order = [&](const std::string& more) {
    return R"({"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Block"]}, "gradient_sync": "last_microbatch",
               "gradient_accumulation": 2, "sync": {"type": "asynchronous")" +
           more + "}}";
  };
  write_file(path("free.json"), with_order(""));
  write_file(path("play.json"), with_order(R"(, "play_order": ")" + path("order.jsonl") + "\""));
  const Words slow = {"--straggler", "1=3", "--steps", "4", "--order", path("order.jsonl")};
  const Ended simulated = run(world("simulate", path("free.json"), "2", slow, "1"));
  const auto made = read_lines(path("order.jsonl")).front().at("steps").get<std::vector<std::int64_t>>();
  ASSERT_EQ(made.size(), 2u);
  EXPECT_EQ(made[0] + made[1], 8) << "as many gradients as 4 synchronous steps have";
  EXPECT_GT(made[0], made[1]);
  const std::string counts = std::to_string(made[1]) + " to " + std::to_string(made[0]);
  EXPECT_THAT(simulated.out, AllOf(HasSubstr("gradients of a rank that count: " + counts),
                                   HasSubstr("--steps " + std::to_string(made[0]) + " makes its " + counts)));
  std::map<std::int64_t, double> ages;  // [step of rank 0]: age, which all shards have
  double all_ages = 0, pushes = 0;
  std::map<std::string, std::int64_t> pulled;
  for (const json& line : read_lines(path("order.jsonl"))) {
    if (!line.contains("event")) continue;
    const auto rank = line.at("rank").get<int>();
    const auto version = line.at("version").get<std::int64_t>();
    std::int64_t& before =
        pulled[line.at("unit").dump() + line.at("group").dump() + line.at("shard").dump() + std::to_string(rank)];
    if (line.at("op") == "pull") {
      before = version;
      continue;
    }
    ++pushes;
    all_ages += static_cast<double>(version - before);
    if (rank == 0) ages[line.at("step").get<std::int64_t>()] = static_cast<double>(version - before);
  }
  EXPECT_THAT(simulated.out, HasSubstr(app::number_text(all_ages / pushes, "staleness of these ranks: mean %.2f")));

  const Words enough = {"--steps", "100"}, weights = {"--save-weights", path("weights.pt")};
  run(launch(2) + train(path("play.json"), "first", enough + weights));
  run(launch(2) + train(path("play.json"), "second", enough));
  EXPECT_EQ(losses("second"), losses("first"));
  run(train(path("play.json"), "alone", enough));
  EXPECT_EQ(losses("alone"), losses("first")) << "one process without a launcher plays the order by threads";
  EXPECT_TRUE(std::filesystem::exists(path("weights.pt"))) << "they are saved when all pushes of the order are made";
  ASSERT_EQ(std::ssize(steps("first")), made[0]);
  for (const json& step : steps("first"))
    EXPECT_EQ(step.at("staleness_mean").get<double>(), ages.at(step.at("step").get<std::int64_t>())) << step;

  const Ended kept = fail(world("simulate", path("free.json"), "2", slow, "1"));
  EXPECT_EQ(kept.code, 73) << "an order that exists is kept";
  const Ended meets =
      fail(launch(2) + train(path("play.json"), "meets", enough + Words{"--checkpoint-dir", path("checkpoints")}));
  EXPECT_EQ(meets.code, 64) << meets.err;
  EXPECT_THAT(meets.err, HasSubstr("make different numbers of steps"));
  const Ended few = fail(train(path("play.json"), "few", {"--steps", "1"}));
  EXPECT_EQ(few.code, 64) << few.err;
  EXPECT_THAT(few.err, HasSubstr("hint: give --steps " + std::to_string(made[0])));
  const Ended alone = fail(train(path("play.json"), "meets", enough + Words{"--checkpoint-dir", path("checkpoints")}));
  EXPECT_EQ(alone.code, 64) << alone.err;
  EXPECT_THAT(alone.err, HasSubstr("hint: start it by tessera launch -n 2"));
  const Ended none = fail(world("simulate", strategy("FULL_SHARD"), "2", {"--order", path("none.jsonl")}));
  EXPECT_EQ(none.code, 78);
  EXPECT_THAT(none.err, AllOf(HasSubstr("simulate --order"), HasSubstr("hint:")));
}

TEST_F(Prediction, PlanAndSimulateSayWhatBackupsCostAndGain) {
  measure();
  const auto backed_up = [&](const std::string& backups) {
    write_file(path("backups.json"),
               R"({"strategy": "SHARD_GRADIENTS", "gradient_accumulation": 4, "reproducible": true,
                                         "gradient_sync": "last_microbatch", "units": {"classes": ["Block"]},
                                         "deal": {"by": "speed", "backups": )" +
                   backups + "}}");
    return path("backups.json");
  };
  const Words stalls = {"--stall", "0.2=1"};
  const auto plan_of = [&](const std::string& backups, const Words& more) {
    return json::parse(run(world("plan", backed_up(backups), "2", more + Words{"--json"})).out);
  };
  const json alike = plan_of("2", {}), slow = plan_of("2", stalls);
  EXPECT_EQ(alike.at("backups").at("made_again"), 0);
  EXPECT_GT(slow.at("backups").at("made_again").get<double>(), 0);
  EXPECT_GT(slow.at("backups").at("seconds").get<double>(), alike.at("backups").at("seconds").get<double>());
  const auto total = [](const json& plan) { return plan.at("total_bytes").get<std::int64_t>(); };
  const json none = json::parse(run(world("plan", backed_up("0"), "2", {"--json"})).out);
  EXPECT_EQ(slow.at("backups").at("memory_bytes"), total(slow) - total(none));
  EXPECT_FALSE(none.contains("backups"));
  EXPECT_THAT(run(world("plan", backed_up("2"), "2", stalls)).out,
              ContainsRegex("deal.backups 2: a step takes .* s (won|lost)"));
  EXPECT_THAT(run(world("simulate", backed_up("2"), "2", stalls + Words{"--steps", "100"})).out,
              AllOf(ContainsRegex("deal.backups 2: a step takes .* s (won|lost)"),
                    HasSubstr("microbatches of a step that another rank")));
  const Ended unused = fail(world("plan", backed_up("0"), "2", stalls));
  EXPECT_EQ(unused.code, 64);
  EXPECT_THAT(unused.err, HasSubstr("a strategy that has deal.backups"));
}

TEST_F(Prediction, ServersShareTheWorkOfPushes) {
  measure();
  write_file(path("servers.json"), R"({"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Block"]},
                                       "sync": {"type": "asynchronous", "owners": "servers"}})");
  const auto push_s = [&](const std::string& servers) {
    const Words more = {"--json", "--servers", servers};
    return json::parse(run(world("plan", path("servers.json"), "2", more)).out).at("step").at("push_s").get<double>();
  };
  EXPECT_GT(push_s("1"), push_s("4"));
  const Ended none = fail(world("plan", strategy("FULL_SHARD"), "2", {"--servers", "2"}));
  EXPECT_EQ(none.code, 64);
  EXPECT_THAT(none.err, AllOf(HasSubstr("--servers says"), HasSubstr("hint:")));
  const Ended stall = fail(world("simulate", path("servers.json"), "2", {"--stall", "often"}));
  EXPECT_EQ(stall.code, 64);
  EXPECT_THAT(stall.err, AllOf(HasSubstr("--stall \"often\""), HasSubstr("hint:")));
}

TEST_F(Prediction, StrategiesAreComparedByTime) {
  measure();
  write_file(path("like.json"), R"({"units": {"classes": ["Block"]}, "memory": {"limit": "1GiB"}})");
  const Words more = {"--like", path("like.json"), "--accumulations", "1,2", "--json"};
  const json tried = json::parse(run(world("plan", "auto", "2", more)).out);
  ASSERT_GT(tried.size(), 10u);
  std::set<std::string> strategies;
  double last = 0;
  for (const json& each : tried) {
    const std::size_t before = strategies.size();
    strategies.insert(each.at("strategy").at("strategy").get<std::string>());
    EXPECT_EQ(each.at("fits"), true);
    EXPECT_GE(each.at("seconds_a_microbatch").get<double>(), last) << "the fastest come first";
    last = each.at("seconds_a_microbatch").get<double>();
    // A strategy's numbers equal those of its own plan; one strategy of each kind is compared.
    if (strategies.size() == before) continue;
    write_file(path("one.json"), each.at("strategy").dump());
    const json plan = json::parse(run(world("plan", path("one.json"), "2", {"--json"})).out);
    EXPECT_EQ(plan.at("step"), each.at("step"));
    EXPECT_EQ(plan.at("total_bytes"), each.at("total_bytes"));
  }
  EXPECT_EQ(strategies,
            (std::set<std::string>{"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD"}));

  // The limit is the smallest amount of memory that one of the strategies needs.
  const auto needs = [](const json& each) { return each.at("total_bytes").get<std::int64_t>(); };
  std::int64_t least = needs(tried[0]);
  for (const json& each : tried) least = std::min(least, needs(each));
  const auto limited = [&](std::int64_t bytes) {
    write_file(path("like.json"),
               R"({"units": {"classes": ["Block"]}, "memory": {"limit": )" + std::to_string(bytes) + "}}");
    return run_program(world("plan", "auto", "2", {"--like", path("like.json"), "--write", path("chosen.json")}),
                       path("run"));
  };
  const Ended small = limited(least);
  EXPECT_EQ(small.code, 0) << small.err;
  EXPECT_THAT(small.out, AllOf(HasSubstr("the fastest that fits: "), HasSubstr("s a microbatch")));
  const json plan = json::parse(run(world("plan", path("chosen.json"), "2", {"--json"})).out);
  EXPECT_LE(needs(plan), least);
  EXPECT_EQ(limited(least).code, 73) << "a file that exists is kept";
  std::filesystem::remove(path("chosen.json"));
  const Ended none = limited(least - 1);
  EXPECT_EQ(none.code, 78);
  EXPECT_THAT(none.err, AllOf(HasSubstr("no strategy fits"), HasSubstr("hint:")));
  EXPECT_FALSE(std::filesystem::exists(path("chosen.json")));
}

// Another mode changes what is computed, so all modes are shown, and none is chosen.
TEST_F(Prediction, ModesAreShownBesideTheChoiceForRanksThatDiffer) {
  measure();
  write_file(path("like.json"), R"({"units": {"classes": ["Block"]}})");
  const Words slow = {"--like", path("like.json"), "--straggler", "3=4", "--stall", "0.1=0.01"};
  const Ended table = run(world("plan", "auto", "4", slow + Words{"--write", path("chosen.json")}, "1"));
  for (const char* mode : {"synchronous", "backups, count 1", "asynchronous, max_staleness 4", "hogwild",
                           "local_sgd, every 8", "diloco, every 8", "streaming_diloco, every 8"})
    EXPECT_THAT(table.out, ContainsRegex(std::string(mode) + " +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ "));
  EXPECT_THAT(table.out, AllOf(HasSubstr("docs/guide/strategies.md"), Not(HasSubstr("not possible"))));
  EXPECT_EQ(file("chosen.json").at("sync").at("type"), "each_step");

  const json modes = json::parse(run(world("plan", "auto", "4", slow + Words{"--json"}, "1")).out).at(0).at("modes");
  ASSERT_EQ(modes.size(), 7u);
  for (const std::size_t i : {0u, 2u, 3u, 6u}) {  // these modes use every way to simulate a run
    write_file(path("mode.json"), modes[i].at("strategy").dump());
    const std::string seconds = app::number_text(modes[i].at("seconds").get<double>(), ": %.4f s a step");
    const Words alike = {"--straggler", "3=4", "--stall", "0.1=0.01", "--steps", "100"};
    EXPECT_THAT(run(world("simulate", path("mode.json"), "4", alike, "1")).out, HasSubstr(seconds)) << modes[i];
  }

  const Words hosts = {"--like", path("like.json"), "--servers", "2", "--json"};
  const json far = json::parse(run(world("plan", "auto", "2", hosts)).out).at(0).at("modes");
  std::set<std::string> possible;
  for (const json& each : far) {
    if (each.contains("not_possible")) {
      EXPECT_THAT(each.at("not_possible").get<std::string>(), AllOf(HasSubstr("2 hosts"), HasSubstr("hint:")));
      continue;
    }
    EXPECT_GT(each.at("microbatches_per_s").get<double>(), 0) << each;
    possible.insert(each.at("mode").get<std::string>());
  }
  EXPECT_EQ(possible, (std::set<std::string>{"asynchronous, max_staleness 4, owners servers", "diloco, every 8",
                                             "local_sgd, every 8", "streaming_diloco, every 8", "synchronous"}));
  const Ended no_choice = fail(world("plan", strategy("FULL_SHARD"), "2", {"--stall", "0.1=1"}));
  EXPECT_EQ(no_choice.code, 64);
  EXPECT_THAT(no_choice.err, HasSubstr("--strategy auto"));
}

TEST_F(Prediction, MissingOrMismatchedInputsAreNamed) {
  measure();
  EXPECT_EQ(fail({TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy", strategy("FULL_SHARD"),
                  "--world-size", "2", "--links", path("links.json")})
                .code,
            64);
  const Ended no_time =
      fail({TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy", "auto", "--world-size", "2"});
  EXPECT_EQ(no_time.code, 64);
  EXPECT_THAT(no_time.err, HasSubstr("needs --links and --profile"));
  const Ended no_choice = fail(world("plan", strategy("FULL_SHARD"), "2", {"--write", path("chosen.json")}));
  EXPECT_EQ(no_choice.code, 64);
  EXPECT_THAT(no_choice.err, HasSubstr("--strategy auto"));
  const Ended alone = fail({TESSERA_PROGRAM, "doctor", "--links", path("a.json")});
  EXPECT_EQ(alone.code, 64);
  EXPECT_THAT(alone.err, AllOf(HasSubstr("--links measures between ranks"), HasSubstr("hint:")));
  const Ended ranks = fail(launch(2) + train(strategy("FULL_SHARD"), "two.jsonl", {"--profile", path("p.json")}));
  EXPECT_EQ(ranks.code, 64);
  EXPECT_THAT(ranks.err, HasSubstr("a profile of 2 ranks"));
  write_file(path("other.json"), R"({"strategy": "FULL_SHARD", "units": {"modules": ["blocks"]}})");
  const Ended units = fail(world("plan", path("other.json"), "2"));
  EXPECT_EQ(units.code, 65);
  EXPECT_THAT(units.err, HasSubstr("blocks.0"));
  write_file(path("links.json"), R"({"transport": "gloo", "ranks": 2})");
  const Ended links = fail(world("plan", strategy("FULL_SHARD"), "2"));
  EXPECT_EQ(links.code, 65);
  EXPECT_THAT(links.err, AllOf(HasSubstr("links.json"), HasSubstr("all_gather")));
}

}  // namespace prediction_test
}  // namespace tessera::testing
