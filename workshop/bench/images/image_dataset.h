#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace tessera {

/// Small labelled images. The set is immutable and thread-safe; its labels and sizes were checked when it was made.
class ImageDataset {
 public:
  static constexpr std::int64_t kChannels = 3, kSide = 32;
  static constexpr std::int64_t kNumel = kChannels * kSide * kSide;  ///< numbers of an image
  static constexpr std::int64_t kClasses = 10;

  virtual ~ImageDataset() = default;

  virtual std::int64_t num_images() const = 0;  ///< > 0
  /// Copies image `i` as [kChannels, kSide, kSide], normalised to a mean of about 0 and a variance of about 1 over the
  /// dataset. Returns its label, in [0, kClasses). REQUIRES: 0 <= i < num_images(), pixels.size() == kNumel.
  virtual std::int64_t copy(std::int64_t i, std::span<float> pixels) const = 0;
  /// Returns a line such as "data/cifar: CIFAR-10, 50000 images".
  virtual std::string describe() const = 0;
};

/// The part of the data set to read.
enum class Cifar10Split {
  kTrain,  ///< data_batch_1.bin to data_batch_5.bin
  kTest,   ///< test_batch.bin
};

/// CIFAR-10 in its binary version (cs.toronto.edu/~kriz/cifar.html). A record is a label byte and 3072 pixel bytes: the
/// red plane of 32 x 32 pixels row by row, then the green plane, then the blue plane. Files are mapped; opening reads
/// the labels. Pixels are scaled to [0, 1]. Then the mean of the channel over the training images is subtracted, and
/// the difference is divided by the channel's standard deviation.
///
/// A file may have any number of records above 0, so a part of the data is enough.
/// Errors name file and offset: 66 if a file is missing; 65 if it is empty, does not consist of whole records, or has a
/// label above 9; 77 without permission.
absl::StatusOr<std::unique_ptr<ImageDataset>> open_cifar10(const std::filesystem::path& folder, Cifar10Split split);

/// Makes images from which a model can learn, for use without a data set. Each class has a pattern of a few waves per
/// channel, and an image is its class's pattern, shifted by a pixel at most each way, with noise of twice the pattern's
/// variance. The whole has variance 1. Image i is a function of (seed, i) alone, so it is the same on any number of
/// ranks. Different ranges of i are different images of the same classes. Classes alternate: image i has label i mod
/// 10.
///
/// `first` is the number of this data set's image 0. Held-out images have numbers after those of the training images.
std::unique_ptr<ImageDataset> generate_images(std::uint64_t seed, std::int64_t first, std::int64_t num_images);

}  // namespace tessera
