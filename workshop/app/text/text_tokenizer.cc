#include "workshop/app/text/text_tokenizer.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "checkpoint/files/hash.h"
#include "checkpoint/files/regular_file.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/data/text_files.h"
#include "workshop/app/output_files.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

constexpr char kTokenizerFile[] = "tokenizer.json";
constexpr std::int64_t kMostTokenizerBytes = std::int64_t{256} << 20;

/// A dataset of text. Its tokens are in memory, file after file.
class TokenizedText final : public TokenDataset {
 public:
  TokenizedText(std::string name, std::int64_t vocab_size) : name_(std::move(name)), vocab_size_(vocab_size) {}

  absl::Status add(const MappedFile& file, const Tokenizer& tokenizer) {
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.size());
    const absl::StatusOr<std::size_t> replaced = tokenizer.encode(text, /*add_special=*/true, tokens_);
    if (!replaced.ok())
      return make_error(exit_code_of(replaced.status()), file.path().string() + ": " + message_of(replaced.status()));
    if (*replaced > 0)
      log_warning(file.path().string() + ": " + std::to_string(*replaced) +
                  " parts are no UTF-8, and are read as U+FFFD");
    bytes_ += static_cast<std::int64_t>(file.size());
    files_.push_back(file.path());
    ends_.push_back(static_cast<std::int64_t>(tokens_.size()));
    return absl::OkStatus();
  }

  std::int64_t num_tokens() const override { return static_cast<std::int64_t>(tokens_.size()); }
  std::int64_t vocab_size_hint() const override { return vocab_size_; }
  absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const override {
    TESSERA_RETURN_IF_ERROR(check_window(begin, out.size(), num_tokens(), name_));
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
    return absl::OkStatus();
  }
  std::string location_of(std::int64_t position) const override {
    const auto file = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), position) - ends_.begin());
    const std::int64_t begin = file == 0 ? 0 : ends_[file - 1];
    return files_[file].string() + " at token " + std::to_string(position - begin);
  }
  std::string describe() const override {
    return name_ + ": text, " + std::to_string(bytes_) + " bytes in " + counted(files_.size(), "file") + ", " +
           std::to_string(tokens_.size()) + " tokens of a vocabulary of " + std::to_string(vocab_size_);
  }

 private:
  std::string name_;
  std::int64_t vocab_size_, bytes_ = 0;
  std::vector<Tokenizer::Id> tokens_;
  std::vector<fs::path> files_;
  std::vector<std::int64_t> ends_;  ///< [file]: number of tokens up to the end of the file
};

/// Copies a small file to the model's folder. The function does nothing if there is no such file.
absl::Status copy_file(const fs::path& from, const fs::path& to, Existing existing) {
  std::error_code error;
  if (fs::symlink_status(from, error).type() == fs::file_type::not_found) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_regular_text(from.string(), kMostTokenizerBytes, "--export-hf"));
  return write_output(to, text, existing, "--export-hf");
}

}  // namespace

absl::StatusOr<ChosenTokenizer> choose_tokenizer(const std::string& option, const std::vector<std::string>& folders) {
  ChosenTokenizer chosen;
  std::error_code error;
  if (option == "bytes") return chosen;
  if (!option.empty()) {
    chosen.file = fs::is_directory(option, error) ? fs::path(option) / kTokenizerFile : fs::path(option);
  } else {
    for (const std::string& folder : folders)
      if (chosen.file.empty() && !folder.empty() && fs::is_directory(folder, error) &&
          fs::exists(fs::path(folder) / kTokenizerFile, error))
        chosen.file = fs::path(folder) / kTokenizerFile;
  }
  if (chosen.file.empty()) return chosen;
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_regular_text(chosen.file.string(), kMostTokenizerBytes, "tokenizer"));
  TESSERA_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::parse(text, chosen.file.string()));
  chosen.tokenizer = std::make_shared<const Tokenizer>(std::move(tokenizer));
  chosen.hash = hash_text(checkpoint_hash(text));
  return chosen;
}

absl::Status check_vocabulary(const Tokenizer& tokenizer, std::int64_t vocab_size) {
  if (tokenizer.vocab_size() <= vocab_size) return absl::OkStatus();
  return make_error(ExitCode::kConfig,
                    "the tokenizer has tokens up to " + std::to_string(tokenizer.vocab_size() - 1) +
                        ", but the model has only " + std::to_string(vocab_size) +
                        ". [T0044] hint: name the tokenizer of this model, or give --tokenizer bytes");
}

absl::StatusOr<std::shared_ptr<const TokenDataset>> open_tokens(const fs::path& path, const DatasetOptions& options,
                                                                const std::shared_ptr<const Tokenizer>& tokenizer) {
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset, open_dataset(path, options));
  if (!tokenizer || !dataset->is_text()) return dataset;
  if (dataset->num_tokens() > kMostTextBytes)
    return make_error(
        ExitCode::kCorruptData,
        path.string() + " has " + std::to_string(dataset->num_tokens()) + " bytes of text, and text of up to " +
            std::to_string(kMostTextBytes) +
            " is made into tokens in memory. [T0045] hint: `tessera tokenize` writes tokens to the disk once");
  TESSERA_ASSIGN_OR_RETURN(const std::vector<MappedFile> files, open_text_files(path, options.extensions));
  auto text = std::make_shared<TokenizedText>(path.string(), tokenizer->vocab_size());
  for (const MappedFile& file : files) TESSERA_RETURN_IF_ERROR(text->add(file, *tokenizer));
  if (text->num_tokens() == 0)
    return make_error(ExitCode::kCorruptData,
                      path.string() + ": its text has no tokens. [T0046] hint: name text, or another --tokenizer");
  return text;
}

absl::Status copy_tokenizer(const ChosenTokenizer& chosen, const fs::path& folder, Existing existing) {
  if (chosen.file.empty()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(copy_file(chosen.file, folder / kTokenizerFile, existing));
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"})
    TESSERA_RETURN_IF_ERROR(copy_file(chosen.file.parent_path() / name, folder / name, existing));
  return absl::OkStatus();
}

}  // namespace tessera::app
