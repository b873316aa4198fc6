// Tests that the command `tessera train` offloads state to disk.

#include <gmock/gmock.h>

#include <array>
#include <filesystem>
#include <map>
#include <regex>

#include "tests/support/limits/long_tests.h"
#include "tests/support/pairwise.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace offload_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class OffloadCommand : public Workplace {
 protected:
  OffloadCommand() {
    for (const char* disk : {"disk0", "disk1"}) std::filesystem::create_directory(path(disk));
  }

  std::string offload(const std::string& more = "") const {
    return R"(, "offload": {"masters": {"tier": "nvme"}, "moments": {"tier": "nvme", "fraction": 0.75}, "paths": [")" +
           path("disk0") + R"(", ")" + path("disk1") + R"("], "record": "8KiB", "queue_depth": 2)" + more + "}";
  }

  json plan(const Words& more = {}) const {
    const Ended ended = run(Words{TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy",
                                  path("FULL_SHARD.json"), "--world-size", "2", "--json"} +
                            more);
    return json::parse(ended.out, nullptr, false);
  }
};

constexpr char kParametersToo[] = R"(, "parameters": {"tier": "nvme"})";
constexpr char kGradientsToo[] = R"(, "gradients": {"tier": "nvme"})";
constexpr char kNotShared[] = R"(, "host_sharing": false)";

TEST_F(OffloadCommand, OffloadedRunHasTheSameBitsAndPlannedTraffic) {
  const Words six = {"--steps", "6"};
  run(launch(2) + train(strategy("FULL_SHARD"), "memory", six));
  const std::string verify = R"(, "verify": true)";
  const std::string variants[] = {offload(verify), offload(verify + kParametersToo),
                                  offload(verify + kParametersToo) + kNotShared,
                                  offload(verify + kParametersToo + kGradientsToo)};
  for (std::size_t i = 0; i < std::size(variants); ++i) {
    const std::string out = "disk" + std::to_string(i + 2);
    run(launch(2) + train(strategy("FULL_SHARD", variants[i]), out, six));
    EXPECT_EQ(losses(out), losses("memory"));
    EXPECT_EQ(losses(out).size(), 6u);
    const json planned = plan();
    const auto lines = steps(out);
    EXPECT_EQ(lines.back().at("bytes_allocated"), planned.at("total_bytes"));
    EXPECT_LT(planned.at("total_bytes"), steps("memory").back().at("bytes_allocated"));
    const auto in_two_steps = [&](const char* what) {
      return lines[4].at(what).get<std::int64_t>() + lines[5].at(what).get<std::int64_t>();
    };
    EXPECT_GT(planned.at("disk").at("read_in_two_steps"), 0);
    EXPECT_EQ(in_two_steps("disk_bytes_read"), planned.at("disk").at("read_in_two_steps"));
    EXPECT_EQ(in_two_steps("disk_bytes_written"), planned.at("disk").at("written_in_two_steps"));
    EXPECT_TRUE(std::filesystem::is_empty(path("disk0"))) << "files have no names";
  }
}

// A message about waiting for the disk names a queue depth. A run with this depth gets no such message.
TEST_F(OffloadCommand, MessageNamesAQueueDepthThatHidesTheDisk) {
  const auto said = [&](const std::string& depth, const std::string& in_backward) {
    write_file(path("said.json"), R"({"units": {"classes": ["Block"]}, "optimizer": {"in_backward": )" + in_backward +
                                      R"(}, "offload": {"moments": {"tier": "nvme"}, "paths": [")" + path("disk0") +
                                      R"("], "record": "4KiB", "queue_depth": )" + depth + "}}");
    const Ended ended = run(train(path("said.json"), "said", {"--steps", "1", "--overwrite"}));
    std::smatch found;
    static const std::regex kHint(R"(hint: raise it; ([0-9]+) takes)");
    const std::string text = ended.out + ended.err;
    return std::regex_search(text, found, kHint) ? found.str(1) : "";
  };
  const std::string wanted = said("1", "true");
  EXPECT_GT(std::stoi("0" + wanted), 1);
  EXPECT_EQ(said(wanted, "true"), "");
  EXPECT_EQ(said("1", "false"), "");
  constexpr int kMostChosen = 16;
  EXPECT_EQ(said("null", "true"), std::stoi("0" + wanted) > kMostChosen ? wanted : "");
}

TEST_F(OffloadCommand, FailedDiskEndsAllRanksAndNamesTheParameter) {
  const std::array<std::string, 3> variants = {offload(), offload(kParametersToo),
                                               offload(kParametersToo) + kNotShared};
  constexpr const char* kMoments[] = {"20", "40", "61", "150"};  // these lie in set-up, forward, backward and a step
  for (const auto& [nth, variant] : pairwise_of<1>(kMoments, variants)) {
    const Ended ended = run_program(
        launch(2) + train(strategy("FULL_SHARD", variant), "failed", {"--steps", "6", "--overwrite"}), path("run"),
        /*at_rest_s=*/60, {{"TESSERA_TEST_FAULTS", std::string("cqe nth=") + nth + " errno=EIO"}});
    EXPECT_EQ(ended.code, 74) << ended.err;
    EXPECT_THAT(ended.err + ended.out, AllOf(HasSubstr("parameter "), HasSubstr("EIO"), HasSubstr("rank ")));
  }
}

// Only one of two disks fails.
TEST_F(OffloadCommand, FailedDiskOfTwoIsNamed) {
  for (const auto& [nth, more] : pairwise_of<1>(std::array{"5", "31", "70"}, std::array{"", kGradientsToo})) {
    const Ended ended = run_program(
        launch(2) + train(strategy("FULL_SHARD", offload(more)), "failed", {"--steps", "6", "--overwrite"}),
        path("run"),
        /*at_rest_s=*/60, {{"TESSERA_TEST_FAULTS", std::string("cqe path=disk1 nth=") + nth + " errno=EIO"}});
    EXPECT_EQ(ended.code, 74) << ended.err;
    EXPECT_THAT(ended.err + ended.out, AllOf(HasSubstr("disk1"), HasSubstr("EIO"), HasSubstr("rank ")));
  }
}

TEST_F(OffloadCommand, FailedGradientTransferEndsAllAndNamesTheUnit) {
  const std::string only =
      R"(, "offload": {"gradients": {"tier": "nvme"}, "paths": [")" + path("disk0") + R"("]}, "reductions_ahead": 0)";
  // The model has so many units that some sums must be read from disk: only three units have slots.
  write_file(path("model.json"),
             R"({"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 6, "width": 32, "heads": 2})");
  for (const char* rule : {"write path=disk nth=6", "read path=disk nth=3"}) {
    const Ended ended = run_program(
        launch(2) + train(strategy("FULL_SHARD", only), "failed", {"--steps", "6", "--overwrite"}), path("run"),
        /*at_rest_s=*/60, {{"TESSERA_TEST_FAULTS", std::string(rule) + " errno=EIO"}});
    EXPECT_EQ(ended.code, 74) << rule << ended.err;
    EXPECT_THAT(ended.err + ended.out, AllOf(HasSubstr("gradients of unit "), HasSubstr("EIO"), HasSubstr("rank ")));
  }
}

// Fault F1 (docs/faults.md): rank 1 dies at the moments at which a disk fails in
// FailedDiskEndsAllRanksAndNamesTheParameter. Rank 0 ends too, nothing is left behind, and the next run continues with
// the same bits.
TEST_F(OffloadCommand, RankThatDiesAnywhereInAStepEndsAllAndRunResumes) {
  const std::string file = strategy("FULL_SHARD", offload(kParametersToo));
  const Words saves = {"--checkpoint-dir", path("parts"), "--every-steps", "1"};
  run(launch(2) + train(file, "whole", {"--steps", "6"}));
  constexpr const char* kMoments[] = {"40", "61", "150", "20"};  // these lie in forward, backward, a step and set-up
  for (const char* nth : sampled(kMoments, 3)) {
    for (const char* left : {"parts", "died"}) std::filesystem::remove_all(path(left));
    const auto shared_before = shared_memory_names();
    const Words dying = {
        "/bin/sh", "-c",
        std::string("[ $RANK = 1 ] && export TESSERA_TEST_FAULTS='cqe path=disk nth=") + nth + " crash'; exec \"$@\"",
        "sh"};
    const Ended ended =
        run_program(launch(2) + dying + train(file, "died", Words{"--steps", "6"} + saves), path("run"));
    EXPECT_EQ(ended.code, 137) << nth << ended.err;
    EXPECT_TRUE(in_time(ended.seconds, 30)) << nth;
    EXPECT_THAT(ended.err, AllOf(HasSubstr("rank 1"), HasSubstr("[rank 0] "), HasSubstr("is gone"))) << nth;
    EXPECT_THAT(shared_memory_left(shared_before), ::testing::IsEmpty());
    EXPECT_TRUE(std::filesystem::is_empty(path("disk0"))) << nth;
    run(launch(2) + train(file, "died", Words{"--steps", "6", "--overwrite"} + saves));
    std::map<std::string, std::string> last;  // the last line of each step; some steps are made again
    for (const std::string& line : losses("died")) last[line.substr(0, line.find(' '))] = line;
    std::vector<std::string> lines;
    for (const auto& [step, line] : last) lines.push_back(line);
    EXPECT_EQ(lines, losses("whole")) << nth;
  }
}

// Fault F46 (docs/faults.md): each transfer takes 10 ms longer, and 50 ms longer on rank 1. The run takes longer than
// comm.timeout_s, but no call does.
TEST_F(OffloadCommand, SlowDiskMakesStepsLongerButEndsNothing) {
  run(launch(2) + train(strategy("FULL_SHARD", offload(kParametersToo)), "fast", {"--steps", "3"}));
  const std::string file = strategy("FULL_SHARD", offload(kParametersToo) + R"(, "comm": {"timeout_s": 3})");
  const Words slow = {"/bin/sh", "-c",
                      "ms=10; [ $RANK = 1 ] && ms=50; export TESSERA_TEST_FAULTS=\"read path=disk every=1 delay=$ms; "
                      "write path=disk every=1 delay=$ms\"; exec \"$@\"",
                      "sh"};
  run(launch(2) + slow + train(file, "slow", {"--steps", "3"}));
  EXPECT_EQ(losses("slow"), losses("fast"));
  double slow_s = 0, waited_s = 0, fast_s = 0;
  for (const json& step : steps("slow")) slow_s += step.at("seconds").get<double>();
  for (const json& step : steps("fast")) fast_s += step.at("seconds").get<double>();
  for (const json& step : steps("slow")) waited_s += step.at("disk_wait_seconds").get<double>();
  EXPECT_GT(slow_s, 3);
  EXPECT_GT(slow_s, fast_s + 1);
  EXPECT_GT(waited_s, 0.1);
}

TEST_F(OffloadCommand, MissingDirectoryIsRefusedBeforeTheFirstStep) {
  std::filesystem::remove(path("disk1"));
  const Ended ended = run_program(train(strategy("FULL_SHARD", offload()), "none"), path("run"));
  EXPECT_EQ(ended.code, 73) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr(path("disk1")));
}

TEST_F(OffloadCommand, DoctorAndPlanMeasureDisks) {
  const Ended doctor = run({TESSERA_PROGRAM, "doctor", "--disk", path("disk0"), "--disk", path("missing")}, 120);
  EXPECT_THAT(doctor.out,
              AllOf(HasSubstr("disk of " + path("disk0")), HasSubstr("GB/s"), HasSubstr("disk of " + path("missing"))));
  strategy("FULL_SHARD", offload());
  const json measured = plan({"--measure-disks"}).at("disk").at("measured");
  EXPECT_GT(measured.at("bytes_per_s"), 0);
  EXPECT_GT(measured.at("seconds_a_step"), 0);
}

TEST_F(OffloadCommand, BenchTimesDisksAndSteps) {
  run({TESSERA_PROGRAM, "bench", "offload", "--dir", path("disk0"), "--quick", "--json", path("out.json")}, 120);
  const json report = json::parse(read_file(path("out.json")));
  ASSERT_EQ(report.at("disks").size(), 2u);
  for (const json& disk : report.at("disks")) {
    for (const char* way : {"write", "read", "mixed"}) EXPECT_FALSE(disk.at(way).at("samples_s").empty()) << way;
  }
  ASSERT_EQ(report.at("steps").size(), 4u);
  // Each format moves fewer bytes than the format before it, except the second format. This format also moves the low
  // halves of the masters of bf16 parameters.
  const auto moved = [&](std::size_t i) { return report.at("steps")[i].at("bytes_moved").get<std::int64_t>(); };
  EXPECT_GT(moved(1), moved(0));
  EXPECT_LT(moved(2), moved(1));
  EXPECT_LT(moved(3), moved(2));
}

}  // namespace offload_test
}  // namespace tessera::testing
