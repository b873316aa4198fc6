// Tests the program examples/images: it learns, continues where it stopped, and refuses files that are no pictures.

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/examples/png_file.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace images_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

/// Returns the rows of a table, each by the names of its columns.
std::vector<std::map<std::string, std::string>> rows_of(const std::string& path) {
  std::ifstream file(path);
  const auto cells = [](const std::string& line) {
    std::istringstream text(line);
    std::vector<std::string> found;
    for (std::string cell; std::getline(text, cell, ',');) found.push_back(cell);
    return found;
  };
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> names = cells(line);
  std::vector<std::map<std::string, std::string>> rows;
  while (std::getline(file, line)) {
    const std::vector<std::string> values = cells(line);
    auto& row = rows.emplace_back();
    for (std::size_t i = 0; i < std::min(names.size(), values.size()); ++i) row[names[i]] = values[i];
  }
  return rows;
}

class Images : public Workplace {
 protected:
  void SetUp() override {
    Workplace::SetUp();
    // Ten very different patterns of 8 x 8, with some noise. They have the form that digits.py writes.
    std::mt19937 random(3);
    std::ofstream file(path("digits.csv"));
    std::vector<std::vector<int>> patterns(10, std::vector<int>(64));
    for (auto& pattern : patterns)
      for (int& pixel : pattern) pixel = random() % 2 == 0 ? 2 : 14;
    for (int i = 0; i < 300; ++i) {
      for (const int pixel : patterns[static_cast<std::size_t>(i % 10)])
        file << pixel + static_cast<int>(random() % 5) - 2 << ',';
      file << i % 10 << '\n';
    }
  }

  Words command(const std::string& name, const std::string& out) const {
    return {IMAGES, name, "--data", "digits:" + path("digits.csv"), "--out", path(out), "--width", "8"};
  }
  Ended images(int ranks, const Words& words) const {
    return run(ranks == 1 ? words : launch(ranks, {"--no-prefix"}) + words, 120);
  }
};

TEST_F(Images, PatternsAreLearntAndEpochsAreRows) {
  images(2, command("train", "a") + Words{"--epochs", "5", "--batch", "24", "--rate", "3e-3"});
  const auto rows = rows_of(path("a/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(5));
  EXPECT_EQ(rows[4].at("step"), "5");
  EXPECT_EQ(rows[4].at("ranks"), "2");
  EXPECT_GT(std::stod(rows[4].at("accuracy")), 0.9);
  EXPECT_GT(std::stod(rows[4].at("pictures_per_second")), 0);
  for (const auto& row : rows) {
    EXPECT_GT(std::stod(row.at("communication_share")), 0.0);
    EXPECT_LT(std::stod(row.at("communication_share")), 1.0);
  }
}

// All pictures are equal. If two ranks drew the same random numbers, each sample of a run on one rank would occur
// twice. The mean loss would then be that of the run on one rank, since batch norms see all samples.
TEST_F(Images, RanksDrawDifferentAugmentations) {
  std::vector<double> losses;
  for (const int ranks : {1, 2}) {
    const std::string name = std::to_string(ranks);
    std::ofstream file(path(name + ".csv"));
    for (int picture = 0; picture < 15 * ranks; ++picture) {  // a fifth of them is held out
      for (int pixel = 0; pixel < 64; ++pixel) file << pixel * 5 % 17 << ',';
      file << "3\n";
    }
    file.close();
    images(ranks, {IMAGES, "train", "--data", "digits:" + path(name + ".csv"), "--out", path(name), "--width", "8",
                   "--epochs", "1", "--batch", std::to_string(12 * ranks)});
    const auto rows = rows_of(path(name + "/epochs.csv"));
    ASSERT_THAT(rows, SizeIs(1));
    losses.push_back(std::stod(rows[0].at("loss")));
  }
  EXPECT_GT(std::abs(losses[0] - losses[1]), 1e-3) << losses[0];
}

TEST_F(Images, ResNet50TrainsOnCifarsFiles) {
  std::filesystem::create_directory(path("cifar"));
  for (int file = 1; file <= 6; ++file) {
    std::string records;
    for (int i = 0; i < 4; ++i) {
      records += static_cast<char>((4 * file + i) % 10);
      records += std::string(3072, static_cast<char>(20 * i + file));
    }
    const std::string name = file == 6 ? "test_batch" : "data_batch_" + std::to_string(file);
    write_file(path("cifar/" + name + ".bin"), records);
  }
  const auto command_of = [&](const std::string& name, const std::string& layers) {
    return Words{IMAGES, name,       "--data", "cifar10:" + path("cifar"), "--out", path("d"), "--width",
                 "4",    "--layers", layers};
  };
  images(2, command_of("train", "50") + Words{"--epochs", "1", "--batch", "20"});
  const auto rows = rows_of(path("d/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(1));
  EXPECT_GT(std::stod(rows[0].at("loss")), 0.1);
  EXPECT_TRUE(std::isfinite(std::stod(rows[0].at("loss"))));
  EXPECT_THAT(images(1, command_of("latency", "50") + Words{"--steps", "1"}).out, HasSubstr("batch 32  p50 "));
  // The checkpoint has a model of 50 layers, so it cannot be loaded into a model of 18 layers.
  EXPECT_NE(run_program(command_of("latency", "18"), path("run")).code, 0);
}

TEST_F(Images, FoldersOfPicturesAreTrainedOn) {
  for (const std::string part : {"train", "val"}) {
    for (const std::string kind : {"cat", "dog"}) {
      const std::string folder = path("pets/" + part + "/" + kind);
      std::filesystem::create_directories(folder);
      const char colour = kind == "cat" ? '\x20' : '\xd0';
      for (int i = 0; i < 6; ++i)
        write_file(folder + "/" + std::to_string(i) + ".png",
                   png_of(std::string(3 * 8 * 8, static_cast<char>(colour + i)), 8));
    }
  }
  const Ended ended = run_program({IMAGES, "train", "--data", "folder:" + path("pets"), "--side", "64", "--out",
                                   path("e"), "--width", "4", "--epochs", "1", "--batch", "12"},
                                  path("run"), 120);
  if (ended.code == 69 && ended.err.find("libstb-dev") != std::string::npos)
    GTEST_SKIP() << "this build reads no folders of pictures (Debian: libstb-dev)";
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto rows = rows_of(path("e/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(1));
  EXPECT_TRUE(std::isfinite(std::stod(rows[0].at("loss"))));
}

TEST_F(Images, RunThatStoppedGoesOnWithTheSameBits) {
  const Words more = {"--batch", "24"};
  images(2, command("train", "whole") + Words{"--epochs", "3"} + more);
  images(2, command("train", "halves") + Words{"--epochs", "1"} + more);
  images(2, command("train", "halves") + Words{"--epochs", "3"} + more);
  const auto whole = rows_of(path("whole/epochs.csv")), halves = rows_of(path("halves/epochs.csv"));
  ASSERT_THAT(whole, SizeIs(3));
  ASSERT_THAT(halves, SizeIs(3));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(whole[i].at("loss"), halves[i].at("loss")) << i;
    EXPECT_EQ(whole[i].at("accuracy"), halves[i].at("accuracy")) << i;
  }
}

TEST_F(Images, OtherRanksGoOnAndMeasureTheCheckpoint) {
  images(1, command("train", "b") + Words{"--epochs", "1", "--batch", "24"});
  const Words rest = command("train", "b") + Words{"--epochs", "2", "--batch", "24"};
  const std::string torchrun = TESSERA_SOURCE "/.venv/bin/torchrun";
  if (std::filesystem::exists(torchrun))
    run(Words{torchrun, "--no-python", "--nproc-per-node", "3", "--master-port", free_port()} + rest, 120);
  else
    images(3, rest);
  const auto rows = rows_of(path("b/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(2));
  EXPECT_EQ(rows[0].at("ranks") + rows[1].at("ranks"), "13");
  EXPECT_THAT(images(1, command("latency", "b") + Words{"--steps", "5"}).out,
              AllOf(HasSubstr("batch  1  p50 "), HasSubstr("batch 32  p50 ")));
}

TEST_F(Images, BucketsOfAllSizesGiveOneLoss) {
  images(2, command("sweep", "c") + Words{"--steps", "3", "--batch", "24", "--buckets", "0.01,0.05,25"});
  const auto rows = rows_of(path("c/buckets.csv"));
  ASSERT_THAT(rows, SizeIs(3));
  EXPECT_EQ(rows[0].at("loss"), rows[1].at("loss"));
  EXPECT_EQ(rows[0].at("loss"), rows[2].at("loss"));
  EXPECT_EQ(std::stod(rows[1].at("bucket_mb")), 0.05);
  EXPECT_GT(std::stod(rows[1].at("communication_share")), 0.0);
}

TEST_F(Images, WrongPicturesAreNamedWithPlaceAndRemedy) {
  std::ofstream(path("short.csv")) << "1,2,3\n";
  std::ofstream(path("high.csv")) << std::string(64 * 2, ' ').replace(0, 3, "17,") << "\n";
  const auto code_of = [&](const std::string& data, const std::string& text) {
    const Ended ended = run_program({IMAGES, "train", "--data", data, "--out", path("no")}, path("run"));
    EXPECT_THAT(ended.err, AllOf(HasSubstr(text), HasSubstr("hint: "))) << data;
    return ended.code;
  };
  EXPECT_EQ(code_of("digits:" + path("short.csv"), "short.csv:1: want number 4 of 65"), 65);
  EXPECT_EQ(code_of("digits:" + path("high.csv"), "high.csv:1: want number 1 of 65"), 65);
  EXPECT_EQ(code_of("digits:" + path("nowhere"), "nowhere cannot be read"), 66);
  EXPECT_EQ(code_of("cifar10:" + path("."), "data_batch_1.bin cannot be read"), 66);
  EXPECT_EQ(code_of("photos", "none of cifar10:FOLDER"), 64);
}

}  // namespace images_test
}  // namespace tessera::testing
