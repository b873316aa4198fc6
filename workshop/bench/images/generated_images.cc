#include <fmt/format.h>

#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "runtime/base/noise.h"
#include "workshop/bench/images/image_dataset.h"

namespace tessera {
namespace {

constexpr std::int64_t kSide = ImageDataset::kSide, kPlane = kSide * kSide;
constexpr int kWaves = 3;
constexpr int kMostShift = 1;
const float kPatternDeviation = std::sqrt(1.0f / 3), kNoiseDeviation = std::sqrt(2.0f / 3);

/// Random words of one stream. Each word is a function of (seed, stream, number).
class Words {
 public:
  Words(std::uint64_t seed, std::uint64_t stream) : key_(mix_bits(mix_bits(seed) + stream)) {}
  std::uint64_t next() { return mix_bits(key_ + ++count_ * 0x9e3779b97f4a7c15u); }
  /// Returns a number in [0, 1).
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  /// Returns a number with mean 0 and variance 1: the sum of four uniform numbers from one word, nearly normal.
  float noise() {
    const std::uint64_t word = next();
    float sum = -2.0f;
    for (int part = 0; part < 4; ++part) sum += (static_cast<float>(word >> 16 * part & 0xffff) + 0.5f) * 0x1p-16f;
    return sum * std::sqrt(3.0f);
  }

 private:
  std::uint64_t key_, count_ = 0;
};

class GeneratedImages : public ImageDataset {
 public:
  GeneratedImages(std::uint64_t seed, std::int64_t first, std::int64_t num_images)
      : seed_(seed), first_(first), num_images_(num_images) {
    for (std::int64_t label = 0; label < kClasses; ++label) patterns_.push_back(pattern_of(label));
  }

  std::int64_t num_images() const override { return num_images_; }

  std::int64_t copy(std::int64_t i, std::span<float> pixels) const override {
    const std::int64_t number = first_ + i, label = number % kClasses;
    Words words(seed_, static_cast<std::uint64_t>(kClasses + number));
    const auto shift = [&] {
      return static_cast<std::int64_t>(words.next() % (2 * kMostShift + 1)) + kSide - kMostShift;
    };
    const std::int64_t down = shift(), right = shift();
    for (std::int64_t p = 0; p < kNumel; ++p) {
      const std::int64_t row = (p % kPlane / kSide + down) % kSide, column = (p % kSide + right) % kSide;
      pixels[p] = patterns_[label][p / kPlane * kPlane + row * kSide + column] + kNoiseDeviation * words.noise();
    }
    return label;
  }

  std::string describe() const override { return fmt::format("{} generated images, seed {}", num_images_, seed_); }

 private:
  using Pattern = std::array<float, kNumel>;

  /// Returns waves with whole periods over the image. So if an image is shifted, the pixels that leave it at one edge
  /// come back at the opposite edge. The sum of the waves has the standard deviation kPatternDeviation.
  Pattern pattern_of(std::int64_t label) const {
    Words words(seed_, static_cast<std::uint64_t>(label));
    Pattern pattern{};
    for (std::int64_t channel = 0; channel < kChannels; ++channel) {
      for (int wave = 0; wave < kWaves; ++wave) {
        const auto across = static_cast<float>(words.next() % 3), along = static_cast<float>(1 + words.next() % 3);
        const float phase = words.uniform();
        for (std::int64_t p = 0; p < kPlane; ++p) {
          const float turns =
              (across * static_cast<float>(p / kSide) + along * static_cast<float>(p % kSide)) / kSide + phase;
          pattern[channel * kPlane + p] +=
              kPatternDeviation * std::sqrt(2.0f / kWaves) * std::sin(2 * std::numbers::pi_v<float> * turns);
        }
      }
    }
    return pattern;
  }

  std::uint64_t seed_;
  std::int64_t first_, num_images_;
  std::vector<Pattern> patterns_;
};

}  // namespace

std::unique_ptr<ImageDataset> generate_images(std::uint64_t seed, std::int64_t first, std::int64_t num_images) {
  return std::make_unique<GeneratedImages>(seed, first, num_images);
}

}  // namespace tessera
