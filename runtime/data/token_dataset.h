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

/// A long row of tokens on disk, read through mapped memory: opening costs no reading of the tokens, and ranks of one
/// host share the page cache. Immutable and thread-safe.
///
/// A dataset was checked against its files' sizes before it came to be, so `copy` cannot run past a file. Values are
/// *not* checked: see `check_vocab` in dataset_stats.h.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;

  virtual std::int64_t num_tokens() const = 0;  ///< > 0
  /// Vocabulary that the format implies: 256 for bytes, 50257 for llm.c's GPT-2 files; 0 where it says nothing.
  virtual std::int64_t vocab_size_hint() const = 0;
  /// Its tokens are the bytes of text, which a tokenizer would make other tokens of.
  virtual bool is_text() const { return false; }
  /// Tokens [begin, begin + out.size()). A window outside of [0, num_tokens()] is refused (70: the caller's mistake).
  virtual absl::Status copy(std::int64_t begin, std::span<std::int64_t> out) const = 0;
  /// Where token `position` lies, for messages: "corpus.bin at byte 1024". REQUIRES: 0 <= position < num_tokens().
  virtual std::string location_of(std::int64_t position) const = 0;
  /// One line: "corpus.bin: llm.c version 1, 12345 tokens of uint16".
  virtual std::string describe() const = 0;
};

/// "auto", "text", "llmc" or "megatron"; 64 for anything else.
absl::StatusOr<TokenFormat> parse_token_format(std::string_view name);

/// Opens `path`. Errors name file, offset, wanted and got: 66 missing, 65 wrong content or no tokens at all, 77 no
/// permission. Under `kAuto`, archives and pickles (.pt, .npy, .parquet, .gz, ...) are refused rather than read as
/// text.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_dataset(const std::filesystem::path& path,
                                                           const DatasetOptions& options = {});

/// The formats by name; `open_dataset` chooses between them.
///
/// Text: files (text_files.h) are laid one after another without a separator.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_text(const std::filesystem::path& path,
                                                        const std::vector<std::string>& extensions = {});
/// llm.c: 256 int32, then the tokens. [0], [1] = 20240520, 1 (uint16) or 20240801, 7 (uint32); [2] = tokens.
absl::StatusOr<std::unique_ptr<TokenDataset>> open_llmc(const std::filesystem::path& path);
/// Megatron: `prefix.idx` describes `prefix.bin` (layout in megatron_dataset.cc). Sequences follow one another in the
/// order of the index, without a separator (Megatron's tools write end-of-document tokens themselves).
absl::StatusOr<std::unique_ptr<TokenDataset>> open_megatron(const std::filesystem::path& prefix);

/// 70 if [begin, begin + n) is not inside [0, num_tokens]: shared by the formats.
absl::Status check_window(std::int64_t begin, std::size_t n, std::int64_t num_tokens, std::string_view file);

}  // namespace tessera
