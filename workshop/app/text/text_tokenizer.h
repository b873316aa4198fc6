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
  std::string hash;                            ///< hash of that file; empty without one

  const Tokenizer* get() const { return tokenizer.get(); }
};

/// Chooses by `option`: a tokenizer.json, a folder that holds one, or "bytes"; if it is empty, the tokenizer in the
/// first of `folders` that holds one, else bytes. Errors: those of Tokenizer::read.
absl::StatusOr<ChosenTokenizer> choose_tokenizer(const std::string& option, const std::vector<std::string>& folders);

/// Checks that all tokens are below a model's `vocab_size`. Errors: 78 if one is not.
absl::Status check_vocabulary(const Tokenizer& tokenizer, std::int64_t vocab_size);

/// Does what open_dataset does, but reads text with `tokenizer`, if there is one, into memory: 4 bytes a token. Each
/// file gets the special tokens that the tokenizer puts around a text. It fails with error 65 for a text of more than
/// kMostTextBytes.
absl::StatusOr<std::shared_ptr<const TokenDataset>> open_tokens(const std::filesystem::path& path,
                                                                const DatasetOptions& options,
                                                                const std::shared_ptr<const Tokenizer>& tokenizer);
inline constexpr std::int64_t kMostTextBytes = std::int64_t{1} << 30;

/// Copies the tokenizer's files into `folder`, if there is one: tokenizer.json, and what transformers keeps beside it.
absl::Status copy_tokenizer(const ChosenTokenizer& chosen, const std::filesystem::path& folder, Existing existing);

}  // namespace tessera::app
