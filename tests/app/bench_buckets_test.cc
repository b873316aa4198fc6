// Tests `tessera bench buckets`, as a user runs it.

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace bench_buckets_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchBuckets : public Workplace {
 protected:
  Words bench(const Words& more = {}) const { return Words{TESSERA_PROGRAM, "bench", "buckets", "--quick"} + more; }

  /// Writes files in CIFAR-10's format with `records` images each. The labels follow each other in turn. Returns their
  /// folder.
  std::string cifar10(int records) const {
    const std::string folder = path("cifar");
    std::filesystem::create_directory(folder);
    std::string bytes;
    for (int i = 0; i < records; ++i) {
      bytes += static_cast<char>(i % 10);
      bytes += std::string(3072, static_cast<char>(20 * i));
    }
    for (const char* name :
         {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"})
      write_file(folder + "/" + name + ".bin", bytes);
    return folder;
  }
};

TEST_F(BenchBuckets, BothModelsAreMeasuredUnderEveryBucketSize) {
  const Ended ended = run(bench({"--json", path("out.json"), "--csv", path("out.csv")}));
  EXPECT_THAT(ended.out, AllOf(HasSubstr("host, 2 ranks"), HasSubstr("resnet18: "), HasSubstr("gpt: "),
                               HasSubstr("the best bucket is "), HasSubstr("goal 1.20x"), HasSubstr("alpha = "),
                               HasSubstr("generated images"), HasSubstr("% right")));
  const auto report = nlohmann::json::parse(read_file(path("out.json")));
  EXPECT_EQ(report.at("ranks"), 2);
  ASSERT_EQ(report.at("models").size(), 2u);
  for (const auto& model : report.at("models")) {
    EXPECT_EQ(model.at("sweep").size(), 9u);
    EXPECT_EQ(model.at("per_tensor_samples_s").size(), 3u);
    EXPECT_EQ(model.at("gradient_bytes"), 4 * model.at("parameters").get<std::int64_t>());
    int most = model.at("per_tensor_collectives");
    EXPECT_GE(most, 50);
    for (const auto& entry : model.at("sweep")) {
      EXPECT_EQ(entry.at("samples_s").size(), 3u);
      EXPECT_LE(entry.at("collectives"), most);
      most = entry.at("collectives");
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_GT(entry.at("communication_s")[i], 0.0);
        EXPECT_LT(entry.at("communication_s")[i], entry.at("samples_s")[i]);
      }
    }
    EXPECT_LE(most, 2) << "small models fit into the first bucket and another";
    EXPECT_EQ(model.at("inference").at("samples_s").size(), 5u);
  }
  const std::string csv = read_file(path("out.csv"));
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 1 + 2 * 10);
  EXPECT_THAT(csv, AllOf(HasSubstr("\nresnet18,0,62,3,"), HasSubstr("\ngpt,0.5,")));
}

TEST_F(BenchBuckets, TrainsOnCifar10OverGloo) {
  const Ended ended = run(bench({"--cifar10", cifar10(8), "--transport", "gloo"}));
  EXPECT_THAT(ended.out, AllOf(HasSubstr("gloo, 2 ranks"), HasSubstr("CIFAR-10, 40 images")));
}

TEST_F(BenchBuckets, MissingDataAndWrongOptionsAreRefused) {
  const Ended missing = run_program(bench({"--cifar10", path("nothing")}), path("run"));
  EXPECT_EQ(missing.code, 66);
  EXPECT_THAT(missing.err, HasSubstr("data_batch_1.bin"));
  write_file(cifar10(8) + "/data_batch_3.bin", "x");
  EXPECT_EQ(run_program(bench({"--cifar10", path("cifar")}), path("run")).code, 65);
  EXPECT_EQ(run_program(bench({"--ranks", "1"}), path("run")).code, 64);
  EXPECT_EQ(run_program(bench({"--transport", "ucx"}), path("run")).code, 64);
  EXPECT_EQ(run_program(bench({"--csv", path("text/such.csv")}), path("run")).code, 73);
}

}  // namespace bench_buckets_test
}  // namespace tessera::testing
