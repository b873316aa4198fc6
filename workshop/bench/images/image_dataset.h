#pragma once

#include <cstdint>
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
  /// Copies image `i` as [kChannels, kSide, kSide], normalised to about mean 0 and variance 1 over the dataset. Returns
  /// its label, in [0, kClasses). REQUIRES: 0 <= i < num_images(), pixels.size() == kNumel.
  virtual std::int64_t copy(std::int64_t i, std::span<float> pixels) const = 0;
  /// Returns a line such as "data/cifar: CIFAR-10, 50000 images".
  virtual std::string describe() const = 0;
};

}  // namespace tessera
