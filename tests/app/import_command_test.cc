// tessera import-config as a user runs it: what goes to stdout, stderr and --out, and its exit codes.

#include <gmock/gmock.h>

#include <filesystem>

#include "tessera/strategy.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kConfigs = TESSERA_SOURCE "/tests/app/import/configs/";

class ImportCommand : public Workplace {
 protected:
  Ended import(const Words& words) const {
    return run_program(Words{TESSERA_PROGRAM, "import-config"} + words, path("run"));
  }
};

TEST_F(ImportCommand, WritesTheStrategyToStdoutAndTheTableToStderr) {
  const Ended ended = import({kConfigs + "ds_zero3_bf16.json"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  const auto strategy = nlohmann::json::parse(ended.out, nullptr, false);
  ASSERT_TRUE(strategy.is_object()) << ended.out;
  EXPECT_EQ(strategy.at("lr_schedule").at("type"), "cosine");
  EXPECT_THAT(ended.err, AllOf(HasSubstr("is a DeepSpeed configuration"), HasSubstr("what became of it"),
                               HasSubstr("zero_optimization.stage"), HasSubstr("strategy = \"FULL_SHARD\""),
                               HasSubstr("ignored: "), HasSubstr("also set"), HasSubstr("0 refused")));
}

TEST_F(ImportCommand, HelpListsIt) {
  EXPECT_THAT(run({TESSERA_PROGRAM, "--help"}).out, HasSubstr("import-config"));
  EXPECT_THAT(run({TESSERA_PROGRAM, "import-config", "--help"}).out,
              AllOf(HasSubstr("--format"), HasSubstr("--out"), HasSubstr("--overwrite"), HasSubstr("--skip-refused")));
}

TEST_F(ImportCommand, TheStrategyPlansAModel) {
  EXPECT_EQ(import({kConfigs + "accelerate_deepspeed_inline.yaml", "--out", path("S.json")}).code, 0);
  const Ended plan =
      run({TESSERA_PROGRAM, "plan", "--model", path("model.json"), "--strategy", path("S.json"), "--world-size", "4"});
  EXPECT_THAT(plan.out, HasSubstr("plan of FULL_SHARD for 4 ranks"));
}

TEST_F(ImportCommand, RefusedKeysMakeItEndWith78AndNothingIsWritten) {
  const Ended ended = import({kConfigs + "ds_zeropp.json", "--out", path("S.json")});
  EXPECT_EQ(ended.code, 78);
  EXPECT_EQ(ended.out, "");
  EXPECT_THAT(ended.err, AllOf(HasSubstr("REFUSED: "), HasSubstr("zero_optimization.zero_hpz_partition_size"),
                               HasSubstr("--skip-refused")));
  EXPECT_FALSE(std::filesystem::exists(path("S.json")));
}

TEST_F(ImportCommand, SkippedKeysAreLeftOutAndNamed) {
  const Ended ended = import({kConfigs + "ds_zeropp.json", "--skip-refused"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("left out, since they are refused: zero_optimization.zero_quantized_weights"));
  EXPECT_EQ(nlohmann::json::parse(ended.out).at("mixed_precision").at("param"), "bf16");
}

TEST_F(ImportCommand, AnExistingStrategyIsKeptUnlessItMayBeReplaced) {
  const std::string out = folder_.write("S.json", "mine");
  const Words command = {kConfigs + "fsdp_transformers.json", "--out", out};
  EXPECT_EQ(import(command).code, 73);
  EXPECT_EQ(folder_.read("S.json"), "mine");
  EXPECT_EQ(import(command + Words{"--overwrite"}).code, 0);
  EXPECT_THAT(folder_.read("S.json"), HasSubstr("LlamaDecoderLayer"));
  const std::string config = folder_.write("ds.json", R"({"train_batch_size": 8})");
  EXPECT_EQ(import({config, "--out", config, "--overwrite"}).code, 64);
}

TEST_F(ImportCommand, TheFormatMayBeSaid) {
  EXPECT_EQ(import({folder_.write("empty.json", "{}"), "--format", "deepspeed"}).code, 0);
  EXPECT_EQ(import({path("empty.json")}).code, 78);
  EXPECT_EQ(import({path("empty.json"), "--format", "megatron"}).code, 64);
  const Ended wrong = import({kConfigs + "fsdp_transformers.json", "--format", "deepspeed"});
  EXPECT_EQ(wrong.code, 78);
  EXPECT_THAT(wrong.err, HasSubstr("unknown key"));
}

}  // namespace
}  // namespace tessera::testing
