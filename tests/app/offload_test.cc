// Training state on disk, as a user of the command meets it.

#include <gmock/gmock.h>

#include <filesystem>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace {

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
constexpr char kNotShared[] = R"(, "host_sharing": false)";

TEST_F(OffloadCommand, TrainsWithTheSameBitsAndMovesWhatWasPlanned) {
  const Words six = {"--steps", "6"};
  run(launch(2) + train(strategy("FULL_SHARD"), "memory", six));
  const std::string verify = R"(, "verify": true)";
  const std::string variants[] = {offload(verify), offload(verify + kParametersToo),
                                  offload(verify + kParametersToo) + kNotShared};
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

TEST_F(OffloadCommand, ADiskThatFailsEndsAllRanksAndNamesTheParameter) {
  for (const std::string& variant : {offload(), offload(kParametersToo), offload(kParametersToo) + kNotShared}) {
    for (const char* nth : {"20", "40", "61", "150"}) {  // in set-up, in forward, in backward, in a step
      const Ended ended = run_program(
          launch(2) + train(strategy("FULL_SHARD", variant), "failed", {"--steps", "6", "--overwrite"}), path("run"),
          /*seconds=*/60, {{"TESSERA_TEST_FAULTS", std::string("cqe nth=") + nth + " errno=EIO"}});
      EXPECT_EQ(ended.code, 74) << ended.err;
      EXPECT_THAT(ended.err + ended.out, AllOf(HasSubstr("parameter "), HasSubstr("EIO"), HasSubstr("rank ")));
    }
  }
}

TEST_F(OffloadCommand, ADirectoryThatIsNotThereIsRefusedBeforeTheFirstStep) {
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
  // Each format moves fewer bytes than the one before, but for the low halves that masters of bf16 parameters have beside.
  const auto moved = [&](std::size_t i) { return report.at("steps")[i].at("bytes_moved").get<std::int64_t>(); };
  EXPECT_GT(moved(1), moved(0));
  EXPECT_LT(moved(2), moved(1));
  EXPECT_LT(moved(3), moved(2));
}

}  // namespace
}  // namespace tessera::testing
