#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/datasets/base.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

/// Labelled pictures of one size. They are not normalised yet. For each channel, a PictureDataset subtracts the mean of
/// the training pictures and divides by their standard deviation.
class Pictures {
 public:
  virtual ~Pictures() = default;
  virtual std::int64_t count() const = 0;
  /// Returns picture `i`, [channels, side, side] uint8, and its label.
  virtual std::pair<at::Tensor, std::int64_t> get(std::int64_t i) const = 0;
};

/// Training and held-out pictures, and the facts about them that a model needs.
struct PictureData {
  std::shared_ptr<const Pictures> training, held_out;
  std::int64_t classes = 0, channels = 0, side = 0;
  at::Tensor mean, deviation;   ///< [channels, 1, 1], in [0, 1]
  bool may_be_mirrored = true;  ///< whether a mirrored picture has the same label
};

/// Opens "cifar10:FOLDER", "digits:FILE" or "folder:FOLDER". Throws a tessera::Error that names the file and the place.
///
/// | kind    | what it is                                                                                       |
/// |---------|--------------------------------------------------------------------------------------------------|
/// | cifar10 | CIFAR-10's binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin; 32 x 32        |
/// | digits  | lines of 64 numbers from 0 to 16 and a label, with commas: UCI's optdigits, and scikit-learn's     |
/// |         | digits.csv (digits.py writes it); 8 x 8. A fifth of the lines, drawn by a fixed seed, is held out  |
/// | folder  | training pictures in FOLDER/train/CLASS, held-out ones in FOLDER/val/CLASS, as JPEG or PNG; each   |
/// |         | is cut to a square in its middle and scaled to `side` x `side`                                    |
PictureData open_pictures(const std::string& source, std::int64_t side);

/// The data set for LibTorch's DataLoader: pictures as fp32, normalised.
class PictureDataset : public torch::data::datasets::Dataset<PictureDataset> {
 public:
  /// `augments`: pictures are moved by up to an eighth of their side, and mirrored if a mirrored picture has the same
  /// label. The random numbers are those of LibTorch's default generator, which a program seeds for each rank.
  PictureDataset(const PictureData& data, bool held_out, bool augments);
  torch::data::Example<> get(std::size_t i) override;
  std::optional<std::size_t> size() const override;

 private:
  std::shared_ptr<const Pictures> pictures_;
  at::Tensor mean_, deviation_;
  bool augments_, mirrors_;
};
