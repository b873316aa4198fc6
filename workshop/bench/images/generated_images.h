#pragma once

#include <cstdint>
#include <memory>

#include "workshop/bench/images/image_dataset.h"

namespace tessera {

/// Makes images from which a model can learn, for use without a data set. Each class has a pattern of a few waves per
/// channel, and an image is its class's pattern, shifted by a pixel at most each way, with noise of twice the pattern's
/// variance. The whole has variance 1. Image i is a function of (seed, i) alone, so it is the same on any number of
/// ranks. Different ranges of i are different images of the same classes. Classes alternate: image i has label i mod
/// 10.
///
/// `first`: the number of this data set's image 0, so that held-out images are those behind the training images.
std::unique_ptr<ImageDataset> generate_images(std::uint64_t seed, std::int64_t first, std::int64_t num_images);

}  // namespace tessera
