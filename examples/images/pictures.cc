#include "examples/images/pictures.h"

#include <ATen/Functions.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#ifdef HAVE_STB
#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include <stb/stb_image.h>
#pragma GCC diagnostic pop
#endif

// CIFAR-10 and digits lie in memory whole. A folder's pictures are read when they are wanted, since they are large.
//
// `open_pictures` calls the reader of the source: `cifar10_of`, `digits` or `folder_of`. `measure` fills in the mean
// and the deviation of training pictures; for a folder, those of ImageNet are used. A PictureDataset normalises each
// picture with them, and may shift and mirror it.

namespace {

namespace fs = std::filesystem;
using tessera::Error;
using tessera::ExitCode;

constexpr std::int64_t kHeldOut = 5;      // every fifth digit is held out
constexpr std::uint32_t kSplitSeed = 17;  // seed of the order that splits training from held-out pictures

/// Pictures in memory.
class Kept : public Pictures {
 public:
  Kept(at::Tensor pixels, std::vector<std::int64_t> labels) : pixels_(std::move(pixels)), labels_(std::move(labels)) {}
  std::int64_t count() const override { return pixels_.size(0); }
  std::pair<at::Tensor, std::int64_t> get(std::int64_t i) const override {
    return {pixels_[i], labels_[static_cast<std::size_t>(i)]};
  }

 private:
  at::Tensor pixels_;  // [N, C, H, W] uint8
  std::vector<std::int64_t> labels_;
};

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad())
    throw Error(ExitCode::kNoInput, path.string() + " cannot be read. hint: see --help for what --data may name");
  return bytes;
}

std::shared_ptr<const Pictures> cifar10_of(const fs::path& folder, const std::vector<std::string>& names) {
  constexpr std::size_t kPixels = 3 * 32 * 32, kRecord = 1 + kPixels;
  std::string all;
  for (const std::string& name : names) {
    const std::string bytes = bytes_of(folder / name);
    if (bytes.empty() || bytes.size() % kRecord != 0)
      throw Error(ExitCode::kCorruptData, (folder / name).string() + ": want records of " + std::to_string(kRecord) +
                                              " bytes, got " + std::to_string(bytes.size()) +
                                              " bytes. hint: unpack cifar-10-binary.tar.gz anew");
    all += bytes;
  }
  const auto count = static_cast<std::int64_t>(all.size() / kRecord);
  const at::Tensor records = at::from_blob(all.data(), {count, static_cast<std::int64_t>(kRecord)}, at::kByte).clone();
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < count; ++i) {
    labels.push_back(static_cast<unsigned char>(all[static_cast<std::size_t>(i) * kRecord]));
    if (labels.back() > 9)
      throw Error(ExitCode::kCorruptData, folder.string() + ": picture " + std::to_string(i) +
                                              ": want a label from 0 to 9, got " + std::to_string(labels.back()) +
                                              ". hint: unpack cifar-10-binary.tar.gz anew");
  }
  return std::make_shared<Kept>(records.slice(1, 1).reshape({count, 3, 32, 32}), std::move(labels));
}

/// Reads 64 numbers and a label from each line.
std::vector<std::array<std::uint8_t, 65>> digit_lines(const fs::path& file) {
  std::istringstream text(bytes_of(file));
  std::vector<std::array<std::uint8_t, 65>> lines;
  for (std::string line; std::getline(text, line);) {
    if (line.empty()) continue;
    auto& numbers = lines.emplace_back();
    const char* at = line.data();
    const char* const end = at + line.size();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      int number = -1;
      const auto read = std::from_chars(at, end, number);
      const int most = i < 64 ? 16 : 9;
      if (read.ec != std::errc() || number < 0 || number > most)
        throw Error(ExitCode::kCorruptData, file.string() + ":" + std::to_string(lines.size()) + ": want number " +
                                                std::to_string(i + 1) + " of 65 from 0 to " + std::to_string(most) +
                                                ". hint: name UCI's optdigits.tra, or what digits.py writes");
      numbers[i] = static_cast<std::uint8_t>(number);
      at = read.ptr == end || *read.ptr != ',' ? read.ptr : read.ptr + 1;
    }
  }
  if (lines.size() < static_cast<std::size_t>(2 * kHeldOut))
    throw Error(ExitCode::kCorruptData, file.string() + ": want " + std::to_string(2 * kHeldOut) +
                                            " pictures at least, got " + std::to_string(lines.size()) +
                                            ". hint: name UCI's optdigits.tra, or what digits.py writes");
  return lines;
}

PictureData digits(const fs::path& file) {
  const auto lines = digit_lines(file);
  std::vector<std::size_t> order(lines.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(kSplitSeed));
  std::array<std::vector<std::uint8_t>, 2> pixels;
  std::array<std::vector<std::int64_t>, 2> labels;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const std::size_t part = place % kHeldOut == 0 ? 1 : 0;
    const auto& line = lines[order[place]];
    for (std::size_t i = 0; i < 64; ++i) pixels[part].push_back(static_cast<std::uint8_t>(line[i] * 255 / 16));
    labels[part].push_back(line[64]);
  }
  const auto kept = [&](std::size_t part) {
    const auto count = static_cast<std::int64_t>(labels[part].size());
    return std::make_shared<Kept>(at::from_blob(pixels[part].data(), {count, 1, 8, 8}, at::kByte).clone(),
                                  labels[part]);
  };
  return {kept(0), kept(1), /*classes=*/10, /*channels=*/1, /*side=*/8, {}, {}, /*may_be_mirrored=*/false};
}

#ifdef HAVE_STB
/// Files of pictures, which are decoded when they are wanted.
class Files : public Pictures {
 public:
  Files(std::vector<std::pair<fs::path, std::int64_t>> files, std::int64_t side)
      : files_(std::move(files)), side_(side) {}
  std::int64_t count() const override { return static_cast<std::int64_t>(files_.size()); }

  std::pair<at::Tensor, std::int64_t> get(std::int64_t i) const override {
    const auto& [path, label] = files_[static_cast<std::size_t>(i)];
    int width = 0, height = 0, channels = 0;
    const std::unique_ptr<stbi_uc, void (*)(void*)> pixels(stbi_load(path.c_str(), &width, &height, &channels, 3),
                                                           stbi_image_free);
    if (!pixels)
      throw Error(ExitCode::kCorruptData, path.string() + ": " + stbi_failure_reason() +
                                              ". hint: take the file out, or save it as JPEG or PNG");
    const std::int64_t square = std::min(width, height);
    at::Tensor picture = at::from_blob(pixels.get(), {height, width, 3}, at::kByte)
                             .slice(0, (height - square) / 2, (height - square) / 2 + square)
                             .slice(1, (width - square) / 2, (width - square) / 2 + square)
                             .permute({2, 0, 1})
                             .to(at::kFloat);
    picture = at::_upsample_bilinear2d_aa(picture.unsqueeze(0), {side_, side_}, /*align_corners=*/false)[0];
    return {picture.round().clamp(0, 255).to(at::kByte), label};
  }

 private:
  std::vector<std::pair<fs::path, std::int64_t>> files_;
  std::int64_t side_;
};

std::vector<std::string> folders_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  if (names.empty())
    throw Error(ExitCode::kNoInput, folder.string() +
                                        " has no folder for a class. hint: put each class's pictures into "
                                        "train/CLASS and val/CLASS");
  std::sort(names.begin(), names.end());
  return names;
}

std::shared_ptr<const Pictures> files_of(const fs::path& folder, const std::vector<std::string>& classes,
                                         std::int64_t side) {
  std::vector<std::pair<fs::path, std::int64_t>> files;
  for (std::size_t label = 0; label < classes.size(); ++label) {
    std::vector<fs::path> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder / classes[label], error)) {
      std::string kind = entry.path().extension().string();
      std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
      if (kind == ".jpg" || kind == ".jpeg" || kind == ".png") found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());  // the system's order differs between hosts
    for (fs::path& path : found) files.emplace_back(std::move(path), static_cast<std::int64_t>(label));
  }
  if (files.empty())
    throw Error(ExitCode::kNoInput, folder.string() + " has no picture. hint: put JPEG or PNG files into its folders");
  return std::make_shared<Files>(std::move(files), side);
}

PictureData folder_of(const fs::path& folder, std::int64_t side) {
  const std::vector<std::string> classes = folders_in(folder / "train");
  return {files_of(folder / "train", classes, side),
          files_of(folder / "val", classes, side),
          static_cast<std::int64_t>(classes.size()),
          /*channels=*/3,
          side,
          at::tensor({0.485f, 0.456f, 0.406f}).view({3, 1, 1}),  // mean of ImageNet, as for torchvision's models
          at::tensor({0.229f, 0.224f, 0.225f}).view({3, 1, 1}),
          /*may_be_mirrored=*/true};
}
#endif

/// Fills in the mean and the deviation of the training pictures.
void measure(PictureData& data) {
  at::Tensor sum = at::zeros({data.channels}, at::kDouble), squares = sum.clone();
  for (std::int64_t i = 0; i < data.training->count(); ++i) {
    const at::Tensor picture = data.training->get(i).first.to(at::kDouble) / 255;
    sum += picture.sum({1, 2});
    squares += picture.square().sum({1, 2});
  }
  const double pixels = static_cast<double>(data.training->count() * data.side * data.side);
  data.mean = (sum / pixels).to(at::kFloat).view({-1, 1, 1});
  data.deviation = (squares / pixels - (sum / pixels).square()).sqrt().clamp_min(1e-3).to(at::kFloat).view({-1, 1, 1});
}

}  // namespace

PictureData open_pictures(const std::string& source, std::int64_t side) {
  const auto colon = source.find(':');
  const std::string kind = source.substr(0, colon), path = colon == std::string::npos ? "" : source.substr(colon + 1);
  PictureData data;
  if (kind == "cifar10") {
    data = {cifar10_of(path, {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                              "data_batch_5.bin"}),
            cifar10_of(path, {"test_batch.bin"}),
            /*classes=*/10,
            /*channels=*/3,
            /*side=*/32,
            {},
            {},
            true};
  } else if (kind == "digits") {
    data = digits(path);
  } else if (kind == "folder") {
#ifdef HAVE_STB
    return folder_of(path, side);
#else
    throw Error(ExitCode::kUnavailable,
                "this build reads no folders of pictures. hint: install libstb-dev and build anew");
#endif
  } else {
    throw Error(ExitCode::kUsage, "--data " + source +
                                      " is none of cifar10:FOLDER, digits:FILE and folder:FOLDER. hint: "
                                      "images --help");
  }
  measure(data);
  return data;
}

PictureDataset::PictureDataset(const PictureData& data, bool held_out, bool augments)
    : pictures_(held_out ? data.held_out : data.training),
      mean_(data.mean),
      deviation_(data.deviation),
      augments_(augments),
      mirrors_(data.may_be_mirrored) {}

torch::data::Example<> PictureDataset::get(std::size_t i) {
  const auto [pixels, label] = pictures_->get(static_cast<std::int64_t>(i));
  at::Tensor picture = (pixels.to(at::kFloat) / 255 - mean_) / deviation_;
  if (augments_) {
    const std::int64_t side = picture.size(1), most = side / 8;
    const auto draw = [](std::int64_t below) { return at::randint(below, {}, at::kLong).item<std::int64_t>(); };
    const at::Tensor padded = at::constant_pad_nd(picture, {most, most, most, most});
    const std::int64_t down = draw(2 * most + 1), right = draw(2 * most + 1);
    picture = padded.slice(1, down, down + side).slice(2, right, right + side);
    if (mirrors_ && draw(2) == 1) picture = picture.flip(2);
  }
  return {picture.contiguous(), at::scalar_tensor(label, at::kLong)};
}

std::optional<std::size_t> PictureDataset::size() const { return static_cast<std::size_t>(pictures_->count()); }
