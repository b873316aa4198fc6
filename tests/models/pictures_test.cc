// Tests how examples/images reads and changes pictures.

#include "examples/images/pictures.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tests/examples/png_file.h"
#include "tests/support/test_folder.h"

namespace tessera::models {
namespace pictures_test {

using tessera::testing::png_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A record of CIFAR-10: all bytes of a plane have the plane's value.
std::string cifar_record(int label, int red, int green, int blue) {
  std::string record(1, static_cast<char>(label));
  for (const int value : {red, green, blue}) record += std::string(32 * 32, static_cast<char>(value));
  return record;
}

/// Writes CIFAR-10's files, with two training pictures in each of five files. Picture i has label i.
void write_cifar(const TestFolder& folder) {
  for (int file = 0; file < 5; ++file) {
    std::string records;
    for (int i = 2 * file; i < 2 * file + 2; ++i) records += cifar_record(i, i, 100 + i, 200 + i);
    folder.write("data_batch_" + std::to_string(file + 1) + ".bin", records);
  }
  std::string held_out = cifar_record(9, 1, 2, 3);
  held_out[1 + 1024 + 32 * 2 + 5] = 77;
  folder.write("test_batch.bin", held_out);
}

/// Expects that `open` throws a tessera::Error of `code` that has `text` and a hint.
void expect_error(const std::function<void()>& open, ExitCode code, const std::string& text) {
  try {
    open();
    ADD_FAILURE() << "no error, want: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), code) << error.message();
    EXPECT_THAT(error.message(), AllOf(HasSubstr(text), HasSubstr("hint: ")));
  }
}

TEST(Pictures, CifarsRecordsAreLabelsAndPlanes) {
  const TestFolder folder;
  write_cifar(folder);
  const PictureData data = open_pictures("cifar10:" + folder.path().string(), /*side=*/224);
  EXPECT_EQ(data.classes, 10);
  EXPECT_EQ(data.channels, 3);
  EXPECT_EQ(data.side, 32);
  EXPECT_TRUE(data.may_be_mirrored);
  ASSERT_EQ(data.training->count(), 10);
  for (std::int64_t i = 0; i < 10; ++i) {
    const auto [pixels, label] = data.training->get(i);
    EXPECT_EQ(label, i);
    ASSERT_EQ(pixels.sizes(), (std::vector<std::int64_t>{3, 32, 32}));
    for (std::int64_t plane = 0; plane < 3; ++plane)
      EXPECT_TRUE(pixels[plane].eq(100 * plane + i).all().item<bool>()) << i << ", " << plane;
  }
  ASSERT_EQ(data.held_out->count(), 1);
  const auto [pixels, label] = data.held_out->get(0);
  EXPECT_EQ(label, 9);
  EXPECT_EQ(pixels[1][2][5].item<int>(), 77);
  EXPECT_EQ(pixels[1][2][4].item<int>(), 2);
  // The value of each plane grows by 1 from one training picture to the next.
  EXPECT_NEAR(data.mean.flatten()[1].item<double>(), 104.5 / 255, 1e-6);
  EXPECT_NEAR(data.deviation.flatten()[2].item<double>(), std::sqrt(8.25) / 255, 1e-5);
}

TEST(Pictures, WrongRecordsOfCifarAreNamed) {
  const TestFolder folder;
  write_cifar(folder);
  const auto open = [&] { open_pictures("cifar10:" + folder.path().string(), 32); };
  folder.write("data_batch_3.bin", std::string(3072, '\0'));
  expect_error(open, ExitCode::kCorruptData, "data_batch_3.bin: want records of 3073 bytes, got 3072 bytes");
  folder.write("data_batch_3.bin", cifar_record(3, 0, 0, 0) + cifar_record(10, 0, 0, 0));
  expect_error(open, ExitCode::kCorruptData, "picture 5: want a label from 0 to 9, got 10");
}

TEST(Pictures, FolderOfPicturesIsCutScaledAndSortedByClass) {
#ifndef HAVE_STB
  GTEST_SKIP() << "this build reads no folders of pictures (Debian: libstb-dev)";
#endif
  const TestFolder folder;
  const std::string black(3, '\0'), white(3, '\xff'), red("\xff\0\0", 3);
  // The middle of the first picture is a square of 4 x 4, whose last row is red.
  const std::string row = white + black + black + black + black + white;
  folder.write("train/cat/1.png", png_of(row + row + row + white + red + red + red + red + white, 4));
  // The second picture is scaled from 8 x 8.
  std::string halves;
  for (int y = 0; y < 8; ++y) halves += black + black + black + black + white + white + white + white;
  folder.write("train/dog/2.PNG", png_of(halves, 8));
  folder.write("train/dog/notes.txt", "no picture");
  folder.write("val/dog/1.png", png_of(red, 1));

  const PictureData data = open_pictures("folder:" + folder.path().string(), /*side=*/4);
  EXPECT_EQ(data.classes, 2);
  EXPECT_EQ(data.side, 4);
  ASSERT_EQ(data.training->count(), 2);
  const auto [cat, cats_label] = data.training->get(0);
  EXPECT_EQ(cats_label, 0);
  ASSERT_EQ(cat.sizes(), (std::vector<std::int64_t>{3, 4, 4}));
  EXPECT_EQ(cat.slice(1, 0, 3).max().item<int>(), 0) << "the white sides are cut off";
  EXPECT_EQ(cat[0][3].min().item<int>(), 255);
  EXPECT_EQ(cat.slice(0, 1).max().item<int>(), 0) << "red has neither green nor blue";
  const auto [dog, dogs_label] = data.training->get(1);
  EXPECT_EQ(dogs_label, 1);
  ASSERT_EQ(dog.sizes(), (std::vector<std::int64_t>{3, 4, 4}));
  EXPECT_EQ(dog.select(2, 0).max().item<int>(), 0);
  EXPECT_EQ(dog.select(2, 3).min().item<int>(), 255);

  ASSERT_EQ(data.held_out->count(), 1);
  const auto example = PictureDataset(data, /*held_out=*/true, /*augments=*/false).get(0);
  EXPECT_EQ(example.target.item<int>(), 1);
  EXPECT_NEAR(example.data[0][0][0].item<double>(), (1 - 0.485) / 0.229, 1e-5);
}

TEST(Pictures, WrongFoldersOfPicturesAreNamed) {
#ifndef HAVE_STB
  GTEST_SKIP() << "this build reads no folders of pictures (Debian: libstb-dev)";
#endif
  const TestFolder folder;
  const std::string source = "folder:" + folder.path().string();
  const auto open = [&] { open_pictures(source, 4); };
  expect_error(open, ExitCode::kNoInput, "train has no folder for a class");
  folder.write("train/cat/1.txt", "no picture");
  expect_error(open, ExitCode::kNoInput, "train has no picture");
  folder.write("train/cat/1.png", "no picture");
  folder.write("val/cat/1.png", "no picture");
  const PictureData data = open_pictures(source, 4);
  expect_error([&] { data.training->get(0); }, ExitCode::kCorruptData, "train/cat/1.png: ");
}

TEST(Pictures, AugmentationIsThatOfTheSeed) {
  const TestFolder folder;
  std::string records;
  for (int i = 0; i < 2; ++i) {
    std::string record(1, static_cast<char>(i));
    for (int pixel = 0; pixel < 3072; ++pixel) record += static_cast<char>((pixel * 7 + i) % 251);
    records += record;
  }
  for (const char* name :
       {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"})
    folder.write(std::string(name) + ".bin", records);
  const PictureData data = open_pictures("cifar10:" + folder.path().string(), 32);
  const auto drawn = [&](std::uint64_t seed, bool augments) {
    at::manual_seed(seed);
    PictureDataset pictures(data, /*held_out=*/false, augments);
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < 10; ++i) all.push_back(pictures.get(i).data);
    return at::stack(all);
  };
  const at::Tensor first = drawn(1, true);
  EXPECT_EQ(first.sizes(), (std::vector<std::int64_t>{10, 3, 32, 32}));
  EXPECT_TRUE(first.equal(drawn(1, true)));
  EXPECT_FALSE(first.equal(drawn(2, true)));
  EXPECT_TRUE(drawn(1, false).equal(drawn(2, false)));
  EXPECT_FALSE(first.equal(drawn(1, false)));
}

}  // namespace pictures_test
}  // namespace tessera::models
