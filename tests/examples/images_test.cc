// Tests the program examples/images: it learns, continues where it stopped, and refuses files that are no pictures.

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "tests/examples/png_file.h"
#include "tests/support/workplace.h"

namespace tessera::testing {
namespace images_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

/// Returns the rows of a table. Each row is a map from the names of columns to cells.
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
  if (std::filesystem::exists(torchrun()))
    run(Words{torchrun(), "--no-python", "--nproc-per-node", "3", "--master-port", free_port()} + rest, 120);
  else
    images(3, rest);
  const auto rows = rows_of(path("b/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(2));
  EXPECT_EQ(rows[0].at("ranks") + rows[1].at("ranks"), "13");
  EXPECT_THAT(images(1, command("latency", "b") + Words{"--steps", "5"}).out,
              AllOf(HasSubstr("batch  1  p50 "), HasSubstr("batch 32  p50 ")));
}

// There are one or two hosts with one rank each, and torchrun starts all ranks again when a host joins or is killed. An
// epoch that was under way is made again, so each epoch has one row.
TEST_F(Images, HostsThatComeAndGoUnderTorchrunLeaveAWholeTable) {
  if (!std::filesystem::exists(torchrun())) GTEST_SKIP() << "torchrun is not installed";
  const auto training = [&](std::size_t epochs) {
    return command("train", "e") + Words{"--batch", "24", "--rate", "3e-3", "--epochs", std::to_string(epochs)};
  };
  const auto rows_by = [&](const std::string& ranks) {
    return std::ranges::count_if(rows_of(path("e/epochs.csv")), [&](auto& row) { return row["ranks"] == ranks; });
  };
  const auto wait_for_epochs = [&](const std::string& ranks, const Program& job) {
    const auto before = rows_by(ranks);
    for (Deadline limit(std::chrono::seconds(60)); rows_by(ranks) < before + 2;) {
      ASSERT_FALSE(limit.passed()) << ranks << " ranks\n" << job.out() << job.err();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  {
    const Words host = elastic_host(free_port()) + training(1'000'000);
    Program stays(host, path("stays"));
    const KilledHost until_then{stays};
    ASSERT_NO_FATAL_FAILURE(wait_for_epochs("1", stays));
    {
      Program comes(host, path("comes"));
      const KilledHost soon{comes};
      ASSERT_NO_FATAL_FAILURE(wait_for_epochs("2", stays));
    }
    ASSERT_NO_FATAL_FAILURE(wait_for_epochs("1", stays));
  }
  const std::size_t epochs = rows_of(path("e/epochs.csv")).size() + 1;
  // The ranks were killed at some moment, and training goes on from there.
  run(Words{"/usr/bin/env", "OMP_NUM_THREADS=1"} + training(epochs), 120);
  const auto rows = rows_of(path("e/epochs.csv"));
  ASSERT_THAT(rows, SizeIs(epochs));
  for (std::size_t i = 0; i < epochs; ++i) EXPECT_EQ(rows[i].at("step"), std::to_string(i + 1));
  EXPECT_GT(std::stod(rows.back().at("accuracy")), 0.9);
  EXPECT_LT(std::stod(rows.back().at("loss")), std::stod(rows.front().at("loss")));
}

// The table has more rows than the checkpoint has epochs if a run was killed after it wrote a row.
TEST_F(Images, RowsOfEpochsThatAreMadeAgainAreReplaced) {
  const auto train = [&](const std::string& epochs) {
    images(1, command("train", "f") + Words{"--epochs", epochs, "--batch", "24"});
    return rows_of(path("f/epochs.csv"));
  };
  const auto first = train("1");
  std::ofstream(path("f/epochs.csv"), std::ios::app) << "2,1,0.5,0.5,1,1,0.5\n3,1,0.";
  const auto both = train("2");
  ASSERT_THAT(both, SizeIs(2));
  EXPECT_EQ(both[0], first[0]);
  EXPECT_EQ(both[1].at("step"), "2");
  EXPECT_NE(both[1].at("loss"), "0.5");
  std::filesystem::remove_all(path("f/checkpoints"));  // a run without a checkpoint begins again
  const auto again = train("1");
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_EQ(again[0].at("loss"), first[0].at("loss"));
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
