#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <memory>

#include "workshop/bench/images/image_dataset.h"

namespace tessera {

/// The part of the data set to read.
enum class Cifar10Split {
  kTrain,  ///< data_batch_1.bin to data_batch_5.bin
  kTest,   ///< test_batch.bin
};

/// CIFAR-10 in its binary version (cs.toronto.edu/~kriz/cifar.html): files of records of a label byte and 3072 pixel
/// bytes, the red plane of 32 x 32 row by row, then the green, then the blue one. Files are mapped; opening reads the
/// labels. Pixels are scaled to [0, 1]; then the training images' mean per channel is subtracted, and the difference is
/// divided by their standard deviation.
///
/// A file may have any number of records above 0, so a part of the data is enough.
/// Errors name file and offset: 66 if a file is missing; 65 if it is empty, does not consist of whole records, or has a
/// label above 9; 77 without permission.
absl::StatusOr<std::unique_ptr<ImageDataset>> open_cifar10(const std::filesystem::path& folder, Cifar10Split split);

}  // namespace tessera
