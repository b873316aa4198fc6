// Tests the commands that do not train, and the texts that must agree with these commands.

#include <gmock/gmock.h>

#include <cstdint>
#include <filesystem>
#include <sstream>

#include "tessera/strategy.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace command_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Command : public Workplace {};

const std::string kExamples = TESSERA_SOURCE "/examples/";

TEST_F(Command, WrongUsageExitsWith64) {
  for (const Words& words : {Words{}, Words{"fly"}, Words{"train"}, Words{"plan", "--world-size", "two"},
                             Words{"launch", "-n", "2"}, Words{"launch", "-n", "0", "--", "true"}}) {
    const Ended ended = run_program(Words{TESSERA_PROGRAM} + words, path("run"));
    EXPECT_EQ(ended.code, 64) << ended.out << ended.err;
  }
  EXPECT_EQ(run_program(train(strategy("FULL_SHARD"), "none", {"--steps", "0"}), path("run")).code, 64);
}

TEST_F(Command, HelpAndVersionArePrinted) {
  EXPECT_THAT(run({TESSERA_PROGRAM, "--help"}).out,
              AllOf(HasSubstr("train"), HasSubstr("doctor"), HasSubstr("launch")));
  EXPECT_THAT(run({TESSERA_PROGRAM, "--version"}).out, HasSubstr("tessera "));
}

TEST_F(Command, CommandsOfThePythonPackageAreExplainedInOneLine) {
  EXPECT_THAT(run({TESSERA_PROGRAM, "--help"}).out, HasSubstr("import-config"));
  const Ended ended = run_program({TESSERA_PROGRAM, "import-config", "ds.json", "--out", "s.json"}, path("run"));
  EXPECT_EQ(ended.code, 64);
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(ended.err,
            "tessera: `import-config` is a module of the Python package. [T0027] hint: python -m tessera.import_config "
            "--help\n");
}

TEST_F(Command, MissingPartIsReportedWithTheTargetThatBuildsIt) {
  namespace fs = std::filesystem;
  fs::create_directory(path("alone"));
  const std::string alone = path("alone/tessera"), part = path("alone/tessera-bench");
  fs::copy_file(TESSERA_PROGRAM, alone);
  const Ended missing = run_program({alone, "bench", "--help"}, path("run"));
  EXPECT_EQ(missing.code, 69) << missing.err;
  EXPECT_THAT(missing.err, AllOf(HasSubstr("`bench` is a program of its own"), HasSubstr(part + ": No such file"),
                                 HasSubstr("hint: cmake --build BUILD --target tessera-bench builds it")));
  write_file(part, "");
  const Ended locked = run_program({alone, "bench", "--help"}, path("run"));
  EXPECT_EQ(locked.code, 77) << locked.err;
  EXPECT_THAT(locked.err, AllOf(HasSubstr(part + ": Permission denied"), HasSubstr("hint: it must be executable")));
  run({alone, "--version"});
}

// A full device accepts no output. Only programs that check their writes notice this.
TEST_F(Command, FailedOutputExitsWith74InEveryProgram) {
  const std::string checkpoints = path("checkpoints");
  run(train(strategy("NO_SHARD"), "metrics", {"--checkpoint-dir", checkpoints}));
  for (const Words& command :
       {Words{"schema"}, Words{"--help"}, Words{"--version"}, Words{"checkpoint", "ls", checkpoints},
        Words{"checkpoint", "show", checkpoints},
        Words{"plan", "--model", path("model.json"), "--strategy", strategy("FULL_SHARD"), "--world-size", "2"},
        Words{"doctor"}, Words{"launch", "-n", "1", "--", "echo", "text"}}) {
    const Ended ended =
        run_program(Words{"/bin/sh", "-c", "exec \"$@\" > /dev/full", "sh", TESSERA_PROGRAM} + command, path("run"));
    EXPECT_EQ(ended.code, 74) << command[0] << ended.err;
    EXPECT_THAT(ended.err, HasSubstr("No space left on device")) << command[0];
  }
}

TEST_F(Command, PrintedSchemaIsTheCommittedOne) {
  EXPECT_EQ(run({TESSERA_PROGRAM, "schema"}).out, read_file(TESSERA_SOURCE "/docs/strategy.schema.json"));
}

TEST_F(Command, DoctorReportsEveryCheckAndAFixForEachWarning) {
  const Ended ended = run({TESSERA_PROGRAM, "doctor"});
  for (const char* what :
       {"Tessera", "LibTorch", "cores", "instruction set", "transparent huge pages", "locked memory", "/dev/shm",
        "shared memory between ranks", "pidfd", "loopback", "io_uring", "CUDA toolkit", "RDMA between hosts"})
    EXPECT_THAT(ended.out, HasSubstr(what));
  std::istringstream lines(ended.out);  // every warning must have its remedy
  const std::string fixes = ended.out.substr(std::min(ended.out.find("how to mend it"), ended.out.size()));
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    if (line.find("  warn  ") == std::string::npos) continue;
    EXPECT_THAT(fixes, HasSubstr(line.substr(0, line.find("  ")) + ":"));
  }
}

TEST_F(Command, BenchWithoutAGpuNamesWhatIsMissing) {
  for (const char* section : {"optimizer", "codecs"}) {
    const Ended ended = run_program({TESSERA_PROGRAM, "bench", section, "--gpu", "--quick"}, path("run"),
                                    /*seconds=*/60, {{"CUDA_VISIBLE_DEVICES", ""}});
    EXPECT_EQ(ended.code, 69) << ended.out << ended.err;
    EXPECT_THAT(ended.err, ::testing::AnyOf(HasSubstr("no CUDA kernels"), HasSubstr("cudaMalloc: ")));
  }
}

TEST_F(Command, PlanOf512RanksNeedsNoneOfThem) {
  const Words base = {TESSERA_PROGRAM, "plan", "--model", kExamples + "configs/gpt_69m.json",
                      "--world-size",  "512",  "--hosts", "64"};
  const Ended table = run(base + Words{"--strategy", kExamples + "strategies/hybrid.json"});
  EXPECT_THAT(table.out,
              AllOf(HasSubstr("512 ranks"), HasSubstr("64 x 8"), HasSubstr("reduce_scatter"), HasSubstr("blocks.7")));
  const Ended json = run(base + Words{"--strategy", kExamples + "strategies/full_shard_bf16.json", "--json"});
  const auto plan = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_TRUE(plan.is_object()) << json.out;
  EXPECT_EQ(plan.at("world_size"), 512);
  EXPECT_EQ(plan.at("mesh").at("shard"), 512);
  std::int64_t parameters = 0;
  for (const auto& unit : plan.at("units")) parameters += unit.at("parameters").get<std::int64_t>();
  EXPECT_EQ(plan.at("parameters"), parameters);
  EXPECT_EQ(run_program(base + Words{"--strategy", "no.json"}, path("run")).code != 0, true);
  EXPECT_EQ(run_program({TESSERA_PROGRAM, "plan", "--model", kExamples + "configs/gpt_10m.json", "--strategy",
                         kExamples + "strategies/no_shard.json", "--world-size", "5", "--hosts", "2"},
                        path("run"))
                .code,
            64);
}

TEST_F(Command, PlanSaysPlacementByAxes) {
  const auto plan = [&](const std::string& more) {
    return Words{TESSERA_PROGRAM, "plan",
                 "--model",       path("model.json"),
                 "--strategy",    strategy("FULL_SHARD", more),
                 "--world-size",  "8",
                 "--hosts",       "2"};
  };
  EXPECT_THAT(run(plan("")).out, AllOf(HasSubstr("plan of FULL_SHARD"),
                                       HasSubstr("placement: parameters [rank], gradients [rank], optimizer [rank]")));
  const std::string by_axes =
      R"(, "placement": {"parameters": [], "gradients": ["rank"], "optimizer": ["host", "rank"]})";
  EXPECT_THAT(run(plan(by_axes)).out,
              AllOf(HasSubstr("plan of placement by axes"), HasSubstr("mesh 2 x 4"),
                    HasSubstr("placement: parameters [], gradients [rank], optimizer [host, rank]")));
  const auto json = nlohmann::json::parse(run(plan(by_axes) + Words{"--json"}).out, nullptr, false);
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json.at("placement").at("optimizer"), nlohmann::json::array({"host", "rank"}));
  EXPECT_EQ(json.at("placement").at("parameters"), nlohmann::json::array());
}

TEST_F(Command, PlanAboveTheMemoryLimitIsRefused) {
  const Ended ended = run_program({TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy",
                                   strategy("FULL_SHARD", R"(, "memory": {"limit": "1KiB"})"), "--world-size", "4"},
                                  path("run"));
  EXPECT_EQ(ended.code, 78);
  EXPECT_THAT(ended.err, HasSubstr("/memory/limit"));
}

// Asynchronous ranks share memory, so a run on several hosts is refused, too.
TEST_F(Command, PlanOfAsynchronousRanksOnSeveralHostsIsRefused) {
  write_file(path("asynchronous.json"), R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous"}})");
  const Words plan = {TESSERA_PROGRAM,           "plan",         "--model", path("model.json"), "--strategy",
                      path("asynchronous.json"), "--world-size", "4",       "--hosts"};
  run(plan + Words{"1"});
  const Ended ended = run_program(plan + Words{"2"}, path("run"));
  EXPECT_EQ(ended.code, 78) << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("/sync/type"), HasSubstr("2 hosts"), HasSubstr("hint:")));
}

TEST_F(Command, PlanOfServersIsTheSameOnOneHostAndOnSeveral) {
  write_file(path("servers.json"),
             R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous", "owners": "servers"}})");
  const auto use = [&](const std::string& hosts) {
    const Ended ended = run({TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy", path("servers.json"),
                             "--world-size", "4", "--hosts", hosts, "--json"});
    return nlohmann::json::parse(ended.out, nullptr, false);
  };
  const nlohmann::json one = use("1"), two = use("2");
  ASSERT_TRUE(one.is_object() && two.is_object());
  EXPECT_GT(one.at("servers").at("bytes").get<std::int64_t>(), 0);
  EXPECT_EQ(one.at("servers"), two.at("servers"));
  EXPECT_EQ(one.at("bytes"), two.at("bytes"));
}

TEST_F(Command, EveryExampleConfigIsPlanned) {
  for (const auto& config : std::filesystem::directory_iterator(kExamples + "configs")) {
    const bool llama = config.path().filename().string().find("llama") != std::string::npos;
    for (const auto& file : std::filesystem::directory_iterator(kExamples + "strategies")) {
      if (llama != (file.path().filename().string().find("llama") != std::string::npos)) continue;
      run({TESSERA_PROGRAM, "plan", "--model", config.path(), "--strategy", file.path(), "--world-size", "8", "--hosts",
           "2"});
    }
  }
}

TEST_F(Command, LaunchGivesTheProgramItsOwnArguments) {
  const Ended ended = run(launch(2) + Words{"/bin/echo", "train", "--help", "--", "-n"});
  EXPECT_THAT(ended.out, AllOf(HasSubstr("[rank 0] train --help -- -n"), HasSubstr("[rank 1] train --help -- -n")));
  EXPECT_EQ(run_program(launch(2) + Words{"/bin/sh", "-c", "exit 9"}, path("run")).code, 9);
}

TEST_F(Command, CppPageShowsTheExampleProgram) {
  const std::string program = read_file(kExamples + "train_gpt.cc");
  ASSERT_FALSE(program.empty());
  EXPECT_THAT(read_file(TESSERA_SOURCE "/docs/start-cpp.md"), HasSubstr("```cpp\n" + program + "```\n"));
}

}  // namespace command_test
}  // namespace tessera::testing
