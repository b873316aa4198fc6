#include <fmt/format.h>

#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/data/mapped_file.h"
#include "workshop/bench/images/image_dataset.h"

namespace tessera {
namespace {

constexpr std::size_t kRecordBytes = 1 + ImageDataset::kNumel;
constexpr char kCifarHint[] = "[T0568] hint: unpack CIFAR-10's binary version, cifar-10-binary.tar.gz, anew";
constexpr float kMean[] = {0.4914f, 0.4822f, 0.4465f}, kDeviation[] = {0.2470f, 0.2435f, 0.2616f};

absl::Status corrupt_images(const MappedFile& file, std::size_t offset, const std::string& what) {
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{}: at byte {}: {}. {}", file.path().string(), offset, what, kCifarHint));
}

absl::Status check(const MappedFile& file) {
  if (file.size() == 0)
    return corrupt_images(file, 0, fmt::format("want records of {} bytes, got an empty file", kRecordBytes));
  if (file.size() % kRecordBytes != 0) {
    return corrupt_images(file, file.size() / kRecordBytes * kRecordBytes,
                          fmt::format("want whole records of {} bytes, got {} bytes at the end of {}", kRecordBytes,
                                      file.size() % kRecordBytes, file.size()));
  }
  for (std::size_t at = 0; at < file.size(); at += kRecordBytes) {
    const int label = std::to_integer<int>(file.bytes()[at]);
    if (label >= ImageDataset::kClasses)
      return corrupt_images(file, at, fmt::format("want a label from 0 to 9, got {}", label));
  }
  return absl::OkStatus();
}

class Cifar10 : public ImageDataset {
 public:
  Cifar10(std::filesystem::path folder, std::vector<MappedFile> files)
      : folder_(std::move(folder)), files_(std::move(files)) {
    std::int64_t records = 0;
    for (const MappedFile& file : files_)
      ends_.push_back(records += static_cast<std::int64_t>(file.size() / kRecordBytes));
  }

  std::int64_t num_images() const override { return ends_.back(); }

  std::int64_t copy(std::int64_t i, std::span<float> pixels) const override {
    std::size_t f = 0;
    while (i >= ends_[f]) ++f;
    const std::int64_t first = f == 0 ? 0 : ends_[f - 1];
    const std::byte* record = files_[f].bytes().data() + static_cast<std::size_t>(i - first) * kRecordBytes;
    constexpr std::size_t kPlane = kSide * kSide;
    for (std::size_t p = 0; p < pixels.size(); ++p) {
      const float value = std::to_integer<int>(record[1 + p]) / 255.0f;
      pixels[p] = (value - kMean[p / kPlane]) / kDeviation[p / kPlane];
    }
    return std::to_integer<std::int64_t>(record[0]);
  }

  std::string describe() const override {
    return fmt::format("{}: CIFAR-10, {} images", folder_.string(), num_images());
  }

 private:
  std::filesystem::path folder_;
  std::vector<MappedFile> files_;
  std::vector<std::int64_t> ends_;  ///< [file]: number of records in this file and all files before it
};

}  // namespace

absl::StatusOr<std::unique_ptr<ImageDataset>> open_cifar10(const std::filesystem::path& folder, Cifar10Split split) {
  std::vector<std::string> names = {"test_batch.bin"};
  if (split == Cifar10Split::kTrain) {
    names = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"};
  }
  std::vector<MappedFile> files;
  for (const std::string& name : names) {
    absl::StatusOr<MappedFile> file = MappedFile::open(folder / name);
    if (!file.ok()) {
      return make_error(
          exit_code_of(file.status()),
          fmt::format("{}. [T0569] hint: name the folder of CIFAR-10's binary version, which holds data_batch_1.bin "
                      "to data_batch_5.bin and test_batch.bin",
                      message_of(file.status())));
    }
    TESSERA_RETURN_IF_ERROR(check(*file));
    files.push_back(*std::move(file));
  }
  return std::make_unique<Cifar10>(folder, std::move(files));
}

}  // namespace tessera
