#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "runtime/data/token_dataset.h"
#include "tessera/existing.h"
#include "workshop/tokenizer/tokenizer.h"

namespace tessera::app {

/// The tokenizer with which text is read.
struct ChosenTokenizer {
  std::shared_ptr<const Tokenizer> tokenizer;  ///< null: text is read as bytes
  std::filesystem::path file;                  ///< path of the tokenizer's tokenizer.json
  std::string hash;                            ///< hash of `file`; empty if there is no such file

  const Tokenizer* get() const { return tokenizer.get(); }
};

/// Chooses the tokenizer that `option` names: a tokenizer.json, a folder with one, or "bytes". If `option` is empty,
/// chooses the tokenizer in the first of `folders` that has one, or else bytes. Errors: those of Tokenizer::read.
absl::StatusOr<ChosenTokenizer> choose_tokenizer(const std::string& option, const std::vector<std::string>& folders);

/// Checks that all tokens are below a model's `vocab_size`. Errors: 78 if a token is not.
absl::Status check_vocabulary(const Tokenizer& tokenizer, std::int64_t vocab_size);

/// Does the same as open_dataset, but reads text with `tokenizer`, if there is one. The tokens are then in memory, with
/// 4 bytes per token. Each file gets the special tokens that the tokenizer puts around a text. The function fails with
/// error 65 if the text has more than kMostTextBytes, or no tokens.
absl::StatusOr<std::shared_ptr<const TokenDataset>> open_tokens(const std::filesystem::path& path,
                                                                const DatasetOptions& options,
                                                                const std::shared_ptr<const Tokenizer>& tokenizer);
inline constexpr std::int64_t kMostTextBytes = std::int64_t{1} << 30;

/// Copies the tokenizer's files into `folder`, if there is a tokenizer: tokenizer.json, and the files that transformers
/// stores beside it.
absl::Status copy_tokenizer(const ChosenTokenizer& chosen, const std::filesystem::path& folder, Existing existing);

}  // namespace tessera::app
