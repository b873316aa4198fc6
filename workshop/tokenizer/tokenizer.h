#pragma once

#include <absl/container/flat_hash_map.h>
#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "workshop/tokenizer/added_tokens.h"
#include "workshop/tokenizer/bpe.h"
#include "workshop/tokenizer/split_pattern.h"

namespace tessera {

/// A step that cuts text into smaller pieces before it is encoded.
struct PieceCutter {
  SplitPattern pattern;
  bool inverted = false;         ///< what the pattern does not match counts as its match
  bool removes_matches = false;  ///< else matches are pieces of their own
};

/// A tokenizer as `tokenizer.json` of Hugging Face describes it, of the kind "byte-level BPE": that of GPT-2, Llama 3,
/// Qwen and others. Gives the tokens that the package `tokenizers` gives, with two things said here:
///
/// * Text that is not UTF-8 is read as if each bad part were U+FFFD (utf8.h), as Python does with errors="replace".
/// * Letters and digits that Unicode has since version 14 may be cut otherwise: each library has the tables of its
///   release.
///
/// Steps: added tokens are found; the text between is brought to Unicode's form NFC if the file says so; patterns cut
/// it into words; byte pairs are joined in each. One thread at a time.
class Tokenizer {
 public:
  using Id = std::uint32_t;

  /// `path`: a tokenizer.json, or a folder that holds one. Errors: 66, 77; 65 what is damaged, or of a kind that is not
  /// built, with the place.
  static absl::StatusOr<Tokenizer> read(const std::filesystem::path& path);
  /// The same for text; `name` stands for the file in messages.
  static absl::StatusOr<Tokenizer> parse(std::string_view json, const std::string& name = "tokenizer.json");

  /// Highest token + 1: what a model's vocabulary must have at least.
  std::int64_t vocab_size() const { return vocab_size_; }
  std::optional<Id> id_of(const std::string& token) const;

  /// Appends the tokens of a text. `add_special`: with those that the file puts before and behind a text ("[BOS]").
  /// Returns how many parts of the text were no UTF-8. 65 where a pattern takes too long.
  absl::StatusOr<std::size_t> encode(std::string_view text, bool add_special, std::vector<Id>& ids) const;

  /// The text of tokens, always UTF-8: where they end within a character there is U+FFFD. Ids that are no tokens are
  /// left out, and special ones with `skip_special`.
  std::string decode(std::span<const std::int64_t> ids, bool skip_special = true) const;

 private:
  friend class TokenizerReader;
  struct Token {
    std::string bytes;
    bool is_special = false;
  };
  using Cache = absl::flat_hash_map<std::string, std::vector<Id>>;
  Tokenizer() = default;
  absl::Status encode_normalized(std::string_view text, StepBudget& budget, Cache& cache, std::vector<Id>& ids) const;
  absl::Status encode_pieces(std::string_view text, std::size_t cutter, StepBudget& budget, Cache& cache,
                             std::vector<Id>& ids) const;
  void encode_word(std::string_view word, Cache& cache, std::vector<Id>& ids) const;

  BytePairEncoding bpe_;
  std::vector<PieceCutter> cutters_;
  bool composes_ = false;              ///< to NFC
  bool adds_prefix_space_ = false;     ///< before a piece that begins with none
  std::size_t prefix_space_at_ = 0;    ///< before which cutter
  AddedTokens as_written_, composed_;  ///< found before and after NFC
  std::vector<Id> before_, behind_;    ///< of a text, with add_special
  absl::flat_hash_map<Id, Token> tokens_;
  absl::flat_hash_map<std::string, Id> ids_;  ///< as the file spells them
  std::int64_t vocab_size_ = 0;
};

}  // namespace tessera
