// Plain text as bytes: one file, or the files of a directory one after another.

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/data/mapped_file.h"
#include "runtime/data/text_files.h"
#include "runtime/data/token_dataset.h"
#include "runtime/data/token_type.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class TextDataset : public TokenDataset {
 public:
  TextDataset(std::string name, std::vector<MappedFile> files) : name_(std::move(name)), files_(std::move(files)) {
    starts_.reserve(files_.size() + 1);
    for (const MappedFile& file : files_) starts_.push_back(starts_.back() + static_cast<std::int64_t>(file.size()));
  }

  std::int64_t num_tokens() const override { return starts_.back(); }
  std::int64_t vocab_size_hint() const override { return 256; }
  bool is_text() const override { return true; }

  absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const override {
    TESSERA_RETURN_IF_ERROR(check_window(begin, out.size(), num_tokens(), name_));
    for (std::size_t file = file_of(begin); !out.empty(); ++file) {
      const std::int64_t left = starts_[file + 1] - begin;
      const auto n = std::min(out.size(), static_cast<std::size_t>(left));
      widen(TokenType::kU8, files_[file].bytes().data() + (begin - starts_[file]), out.first(n));
      out = out.subspan(n);
      begin += static_cast<std::int64_t>(n);
    }
    return absl::OkStatus();
  }

  std::string location_of(std::int64_t position) const override {
    const std::size_t file = file_of(position);
    return fmt::format("{} at byte {}", files_[file].path().string(), position - starts_[file]);
  }

  std::string describe() const override {
    return fmt::format("{}: text, {} bytes in {}", name_, num_tokens(), counted(files_.size(), "file"));
  }

 private:
  /// Returns the index of the file that holds byte `position`. The index is the number of files if `position` is the
  /// end.
  std::size_t file_of(std::int64_t position) const {
    return static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), position) - starts_.begin()) - 1;
  }

  std::string name_;
  std::vector<MappedFile> files_;        ///< none of the files is empty
  std::vector<std::int64_t> starts_{0};  ///< [files + 1], strictly rising: file i holds [starts_[i], starts_[i + 1])
};

bool is_hidden(const fs::path& path) { return path.filename().native().starts_with('.'); }

bool wanted(const fs::path& path, const std::vector<std::string>& extensions) {
  return extensions.empty() ||
         std::find(extensions.begin(), extensions.end(), path.extension().string()) != extensions.end();
}

/// Returns the files below `root` that have one of `extensions` and are not hidden, in the order of their paths' bytes.
/// This order is the same on every machine.
absl::StatusOr<std::vector<fs::path>> walk(const fs::path& root, const std::vector<std::string>& extensions) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::recursive_directory_iterator entry(root, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
      continue;
    }
    std::error_code broken_link;
    if (entry->is_regular_file(broken_link) && wanted(entry->path(), extensions)) found.push_back(entry->path());
  }
  if (error)
    return make_error(error == std::errc::permission_denied ? ExitCode::kPermission : ExitCode::kIo,
                      fmt::format("{}: cannot list: {}", root.string(), reason_of_reading(error.value())));
  std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return found;
}

}  // namespace

absl::StatusOr<std::vector<MappedFile>> open_text_files(const fs::path& path,
                                                        const std::vector<std::string>& extensions) {
  std::vector<fs::path> paths = {path};
  std::error_code error;
  if (fs::is_directory(path, error)) {
    TESSERA_ASSIGN_OR_RETURN(paths, walk(path, extensions));
  }
  std::vector<MappedFile> files;
  for (const fs::path& each : paths) {
    TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(each));
    if (file.size() > 0) files.push_back(std::move(file));
  }
  if (files.empty()) {
    std::string filter;
    for (const auto& extension : extensions) filter += " " + extension;
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("{}: holds no text: {} file(s){}{}, all empty. [T0581] hint: name a folder with text in it",
                    path.string(), paths.size(), filter.empty() ? "" : " with extension", filter));
  }
  return files;
}

absl::StatusOr<std::unique_ptr<TokenDataset>> open_text(const fs::path& path,
                                                        const std::vector<std::string>& extensions) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<MappedFile> files, open_text_files(path, extensions));
  return std::make_unique<TextDataset>(path.string(), std::move(files));
}

}  // namespace tessera
