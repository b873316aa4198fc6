// Tests the reading of CIFAR-10 and the generated images.

#include "workshop/bench/images/image_dataset.h"

#include <gmock/gmock.h>

#include "runtime/base/status.h"
#include "tests/data/test_files.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Image = std::vector<float>;

Image image_of(const ImageDataset& images, std::int64_t i, std::int64_t label) {
  Image pixels(ImageDataset::kNumel);
  EXPECT_EQ(images.copy(i, pixels), label) << i;
  return pixels;
}

/// Returns a record of CIFAR-10 as its web page describes it.
std::string record(std::uint8_t label, std::uint8_t red, std::uint8_t green, std::uint8_t blue) {
  Bytes bytes;
  bytes.put(label);
  for (const std::uint8_t plane : {red, green, blue}) {
    for (int p = 0; p < 1024; ++p) bytes.put(plane);
  }
  return bytes;
}

void write_training_files(const TestFolder& folder) {
  for (int file = 1; file <= 5; ++file) {
    const auto label = static_cast<std::uint8_t>(file);
    const std::string one = record(label, 0, 255, label);
    folder.write("data_batch_" + std::to_string(file) + ".bin", file == 2 ? one + record(0, 9, 9, 9) : one);
  }
}

TEST(Cifar10, RecordsAreReadAcrossFiles) {
  const TestFolder folder;
  write_training_files(folder);
  const auto images = open_cifar10(folder.path(), Cifar10Split::kTrain);
  ASSERT_TRUE(images.ok()) << images.status();
  EXPECT_EQ((*images)->num_images(), 6);
  EXPECT_THAT((*images)->describe(), HasSubstr("CIFAR-10, 6 images"));
  const std::int64_t labels[] = {1, 2, 0, 3, 4, 5};
  for (std::int64_t i = 0; i < 6; ++i) {
    const Image image = image_of(**images, i, labels[i]);
    const float blue = i == 2 ? 9 : static_cast<float>(labels[i]);
    EXPECT_FLOAT_EQ(image[0], ((i == 2 ? 9 : 0) / 255.0f - 0.4914f) / 0.2470f);
    EXPECT_FLOAT_EQ(image[1024], ((i == 2 ? 9 : 255) / 255.0f - 0.4822f) / 0.2435f);
    EXPECT_FLOAT_EQ(image[3071], (blue / 255.0f - 0.4465f) / 0.2616f);
  }
}

TEST(Cifar10, PixelsKeepTheirPlaces) {
  const TestFolder folder;
  std::string bytes = record(7, 0, 0, 0);
  bytes[1 + 1024 + 3 * 32 + 5] = static_cast<char>(200);  // this byte is green in row 3, column 5
  folder.write("test_batch.bin", bytes);
  const auto images = open_cifar10(folder.path(), Cifar10Split::kTest);
  ASSERT_TRUE(images.ok()) << images.status();
  const Image image = image_of(**images, 0, 7);
  EXPECT_FLOAT_EQ(image[1024 + 3 * 32 + 5], (200 / 255.0f - 0.4822f) / 0.2435f);
  EXPECT_FLOAT_EQ(image[1024 + 3 * 32 + 6], -0.4822f / 0.2435f);
}

TEST(Cifar10, WrongFilesAreRefusedWithAHint) {
  const std::string sound = record(3, 1, 2, 3);
  struct Row {
    std::string bytes;
    const char* said;
  };
  const std::vector<Row> table = {
      {"", "at byte 0: want records of 3073 bytes, got an empty file"},
      {"x", "at byte 0: want whole records of 3073 bytes, got 1 bytes at the end of 1"},
      {sound.substr(1), "at byte 0: want whole records of 3073 bytes, got 3072 bytes at the end of 3072"},
      {sound + sound + "x", "at byte 6146: want whole records of 3073 bytes, got 1 bytes at the end of 6147"},
      {sound + record(10, 0, 0, 0), "at byte 3073: want a label from 0 to 9, got 10"},
      {record(255, 0, 0, 0), "at byte 0: want a label from 0 to 9, got 255"},
  };
  const TestFolder folder;
  for (const Row& row : table) {
    folder.write("test_batch.bin", row.bytes);
    const auto images = open_cifar10(folder.path(), Cifar10Split::kTest);
    EXPECT_EQ(exit_code_of(images.status()), ExitCode::kCorruptData) << row.said;
    EXPECT_THAT(message_of(images.status()),
                AllOf(HasSubstr("test_batch.bin"), HasSubstr(row.said), HasSubstr("hint: ")));
  }
}

TEST(Cifar10, MissingFileIsNamed) {
  const TestFolder folder;
  write_training_files(folder);
  std::filesystem::remove(folder / "data_batch_4.bin");
  const auto images = open_cifar10(folder.path(), Cifar10Split::kTrain);
  EXPECT_EQ(exit_code_of(images.status()), ExitCode::kNoInput);
  EXPECT_THAT(message_of(images.status()), AllOf(HasSubstr("data_batch_4.bin"), HasSubstr("hint: ")));
  EXPECT_EQ(exit_code_of(open_cifar10(folder / "nothing", Cifar10Split::kTest).status()), ExitCode::kNoInput);
  std::filesystem::create_directory(folder / "test_batch.bin");
  EXPECT_EQ(exit_code_of(open_cifar10(folder.path(), Cifar10Split::kTest).status()), ExitCode::kCorruptData);
}

TEST(GeneratedImages, ImageDependsOnlyOnSeedAndNumber) {
  const auto all = generate_images(5, 0, 100), later = generate_images(5, 40, 60), other = generate_images(6, 0, 100);
  for (const std::int64_t i : {0, 7, 59}) {
    EXPECT_EQ(image_of(*all, 40 + i, i % 10), image_of(*later, i, i % 10));
    EXPECT_NE(image_of(*all, i, i % 10), image_of(*other, i, i % 10));
  }
  EXPECT_NE(image_of(*all, 0, 0), image_of(*all, 10, 0));  // image 10 is another image of the same class
  EXPECT_THAT(all->describe(), HasSubstr("100 generated images, seed 5"));
}

TEST(GeneratedImages, PixelsHaveMeanZeroAndVarianceOne) {
  const auto images = generate_images(1, 0, 200);
  double sum = 0, squares = 0;
  for (std::int64_t i = 0; i < 200; ++i) {
    for (const float value : image_of(*images, i, i % 10)) sum += value, squares += value * value;
  }
  const double count = 200.0 * ImageDataset::kNumel;
  EXPECT_NEAR(sum / count, 0, 0.02);
  EXPECT_NEAR(squares / count, 1, 0.05);
}

/// Images of a class resemble each other more than images of different classes do, so there is something to learn.
TEST(GeneratedImages, ImagesOfOneClassAreAlike) {
  const auto images = generate_images(1, 0, 400);
  const auto mean_of = [&](std::int64_t label) {
    Image mean(ImageDataset::kNumel);
    for (std::int64_t i = label; i < 400; i += 10) {
      const Image image = image_of(*images, i, label);
      for (std::size_t p = 0; p < mean.size(); ++p) mean[p] += image[p] / 40;
    }
    return mean;
  };
  const auto distance = [](const Image& a, const Image& b) {
    double sum = 0;
    for (std::size_t p = 0; p < a.size(); ++p) sum += (a[p] - b[p]) * (a[p] - b[p]);
    return sum;
  };
  const Image means[] = {mean_of(0), mean_of(1), mean_of(2)};
  const auto held_out = generate_images(1, 400, 30);
  for (std::int64_t i = 0; i < 30; i += 10) {
    for (std::int64_t label = 0; label < 3; ++label) {
      const Image image = image_of(*held_out, i + label, label);
      for (std::int64_t other = 0; other < 3; ++other) {
        if (other == label) continue;
        EXPECT_LT(distance(image, means[label]), distance(image, means[other])) << i + label;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
