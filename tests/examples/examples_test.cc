// Tests that the programs of examples/ learn, on one rank and on several.

#include <gmock/gmock.h>

#include <map>
#include <sstream>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace examples_test {

/// Returns {name: number} of the last line that begins with `word`, such as "epoch 3 loss 0.5 right 0.9".
std::map<std::string, double> last_line(const std::string& output, const std::string& word) {
  std::map<std::string, double> numbers;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(word + " ", 0) != 0) continue;
    std::istringstream words(line);
    std::string name;
    for (double value = 0; words >> name >> value;) numbers[name] = value;
  }
  return numbers;
}

class Examples : public Workplace {
 protected:
  std::string output_of(const std::string& program, int ranks, const Words& arguments = {}) const {
    const Words command = Words{program} + arguments;
    return run(ranks == 1 ? command : launch(ranks, {"--no-prefix"}) + command, 120).out;
  }
};

TEST_F(Examples, PlainClassifierLearns) {
  const auto last = last_line(output_of(PLAIN_CLASSIFIER, 1), "epoch");
  EXPECT_EQ(last.at("epoch"), 15);
  EXPECT_GT(last.at("right"), 0.9);
}

TEST_F(Examples, ShardedClassifierLearnsOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3}) {
    const std::string output = output_of(SHARDED_CLASSIFIER, ranks);
    const auto last = last_line(output, "epoch");
    EXPECT_EQ(last.at("epoch"), 15) << ranks;
    EXPECT_GT(last.at("right"), 0.9) << ranks;
  }
}

TEST_F(Examples, OwnUpdateRuleLearns) {
  for (const int ranks : {1, 2}) {
    const auto last = last_line(output_of(OWN_OPTIMIZER, ranks), "step");
    EXPECT_EQ(last.at("step"), 300) << ranks;
    EXPECT_LT(last.at("loss"), 1.0) << ranks;
  }
}

TEST_F(Examples, OwnMatrixUpdateRuleLearns) {
  const auto last = last_line(output_of(OWN_MATRIX_OPTIMIZER, 2), "step");
  EXPECT_EQ(last.at("step"), 200);
  EXPECT_LT(last.at("loss"), 1.0);
}

TEST_F(Examples, OwnGradientSumLearns) {
  const auto last = last_line(output_of(OWN_COMM_HOOK, 2), "step");
  EXPECT_EQ(last.at("step"), 200);
  EXPECT_LT(last.at("loss"), 1.0);
}

TEST_F(Examples, ScriptLearnsAndTakesItsWeightsBack) {
  const Words script = {TORCH_PYTHON, "-B", TESSERA_SOURCE "/examples/python/script_classifier.py",
                        path("classifier.pt")};
  const Ended scripted = run_program(script, path("run"));
  if (scripted.err.find("No module named 'torch'") != std::string::npos) GTEST_SKIP() << "Python without torch";
  ASSERT_EQ(scripted.code, 0) << scripted.err;
  for (const int ranks : {1, 2}) {
    const auto last = last_line(output_of(SCRIPT_MODULE, ranks, {path("classifier.pt"), path("weights.pt")}), "step");
    EXPECT_EQ(last.at("step"), 300) << ranks;
    EXPECT_GT(last.at("right"), 0.9) << ranks;
  }
  EXPECT_GT(last_line(run(script + Words{path("weights.pt")}).out, "points").at("right"), 0.9);
}

TEST_F(Examples, GeneratorLearnsThroughItsDiscriminator) {
  const auto last = last_line(output_of(GAN, 2), "step");
  EXPECT_EQ(last.at("step"), 600);
  EXPECT_NEAR(last.at("x"), 2, 0.4);
  EXPECT_NEAR(last.at("y"), -1, 0.4);
}

TEST_F(Examples, NetworkLearnsTheSolutionOfAnEquation) {
  const auto last = last_line(output_of(OSCILLATOR, 2), "step");
  EXPECT_EQ(last.at("step"), 600);
  EXPECT_LT(last.at("error"), 0.05);
}

TEST_F(Examples, FineTuningLearnsFrozenAndBetterUnfrozen) {
  const std::string output = output_of(FINETUNE, 2, {path("weights.pt")});
  const double pretrained = last_line(output, "pretrained").at("loss");
  const double head = last_line(output, "head").at("loss"), all = last_line(output, "all").at("loss");
  EXPECT_LT(pretrained, 0.05);
  EXPECT_LT(head, 0.06);
  EXPECT_LT(all, head);
}

TEST_F(Examples, ConvolutionalNetworkWithSyncBatchNormLearns) {
  const auto last = last_line(output_of(CNN, 2), "epoch");
  EXPECT_EQ(last.at("epoch"), 4);
  EXPECT_GT(last.at("right"), 0.9);
}

}  // namespace examples_test
}  // namespace tessera::testing
