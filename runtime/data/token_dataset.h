#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/token_options.h"

namespace tessera {

/// A long row of tokens on disk, read through mapped memory. Opening reads no tokens, and ranks of one host share the
/// page cache. A dataset is immutable and thread-safe.
///
/// `open_dataset` has checked a dataset against its files' sizes, so `copy` cannot run past a file. Values are *not*
/// checked: see `check_tokens` in dataset_stats.h.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;

  virtual std::int64_t num_tokens() const = 0;  ///< > 0
  /// Returns the vocabulary size that the format implies: 256 for bytes, 50257 for llm.c's GPT-2 files; 0 if it implies
  /// none.
  virtual std::int64_t vocab_size_hint() const = 0;
  /// Returns whether the dataset's tokens are the bytes of a text. A tokenizer would make other tokens of this text.
  virtual bool is_text() const { return false; }
  /// Writes tokens [begin, begin + out.size()) to `out`. Error: 70 if the window reaches outside of [0, num_tokens()],
  /// which is the caller's mistake.
  virtual absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const = 0;
  /// Returns the place of token `position` in its file, for messages: "corpus.bin at byte 1024". REQUIRES: 0 <=
  /// position < num_tokens().
  virtual std::string location_of(std::int64_t position) const = 0;
  /// Returns one line: "corpus.bin: llm.c version 1, 12345 tokens of uint16".
  virtual std::string describe() const = 0;
};

/// Reads "auto", "text", "llmc" or "megatron"; error 64 for anything else.
absl::StatusOr<TokenFormat> parse_token_format(std::string_view name);

/// Opens `path`. Errors name the file, the offset, and the wanted and the found value: 66 if the file is missing, 65 if
/// its content is wrong or it has no tokens, 77 if permission is missing. `kAuto` refuses archives and pickles (.pt,
/// .npy, .parquet, .gz, ...) instead of reading them as text.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_dataset(const std::filesystem::path& path,
                                                           const DatasetOptions& options = {});

/// Functions that open each format. `open_dataset` chooses between them.
///
/// Text: files (text_files.h) follow one another without a separator.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_text(const std::filesystem::path& path,
                                                        const std::vector<std::string>& extensions);
/// llm.c: a header of 256 int32, then the tokens. The first two int32 are 20240520 and 1 for uint16, or 20240801 and 7
/// for uint32. The third one is the number of tokens.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_llmc(const std::filesystem::path& path);
/// Megatron: `prefix.idx` describes `prefix.bin` (layout in megatron_dataset.cc). Sequences follow one another in the
/// order of the index, without a separator (Megatron's tools write end-of-document tokens themselves).
absl::StatusOr<std::unique_ptr<TokenDataset>> open_megatron(const std::filesystem::path& prefix);

/// Returns error 70 unless [begin, begin + n) is inside [0, num_tokens]. All formats use it.
absl::Status check_window(std::int64_t begin, std::size_t n, std::int64_t num_tokens, std::string_view file);

}  // namespace tessera
