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
  bool inverted = false;         ///< whether the words are the parts that the pattern does not match
  bool removes_matches = false;  ///< true: matches are dropped; false: each match is a piece
};

/// A tokenizer that Hugging Face's `tokenizer.json` describes, of the kind "byte-level BPE", which GPT-2, Llama 3, Qwen
/// and others use. It gives the same tokens as the package `tokenizers`, with two exceptions:
///
/// * Text that is not UTF-8 is read as if each bad part were U+FFFD (utf8.h), as Python does with errors="replace".
/// * Letters and digits that Unicode has only since version 14 may be cut differently, since each library has the
///   tables of its release.
///
/// Encoding has these steps. Added tokens are found. The text between them is brought into Unicode's form NFC if the
/// file says so. Patterns cut this text into words. Byte pairs are joined in each word. One thread at a time may use a
/// Tokenizer.
class Tokenizer {
 public:
  using Id = std::uint32_t;

  /// Reads `path`: a tokenizer.json, or a folder that holds one. Errors: 66 if the file is missing, 77 if permission is
  /// missing; 65, with the position, if the file is damaged or of an unsupported kind.
  static absl::StatusOr<Tokenizer> read(const std::filesystem::path& path);
  /// Reads a text; `name` stands for the file in messages.
  static absl::StatusOr<Tokenizer> parse(std::string_view json, const std::string& name = "tokenizer.json");

  /// Returns the highest token + 1, which is the smallest possible vocabulary of a model.
  std::int64_t vocab_size() const { return vocab_size_; }
  /// Returns the id of a token, spelled as in the file; nothing if there is no such token.
  std::optional<Id> id_of(const std::string& token) const;

  /// Appends the tokens of a text. If `add_special` is true, the tokens that the file puts before and after a text
  /// ("[BOS]") are included. Returns the number of parts of the text that were no UTF-8. Errors: 65 if a pattern or the
  /// search for added tokens takes too many steps.
  absl::StatusOr<std::size_t> encode(std::string_view text, bool add_special, std::vector<Id>& ids) const;

  /// Returns the text of tokens, always UTF-8: U+FFFD stands at places where the tokens end within a character. Ids
  /// that are no tokens are left out, and special tokens too if `skip_special`.
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
  bool composes_ = false;              ///< text is brought to NFC
  bool adds_prefix_space_ = false;     ///< a space is put before a piece that begins with no space
  std::size_t prefix_space_at_ = 0;    ///< index of the cutter before which the space is put
  AddedTokens as_written_, composed_;  ///< tokens that are found before NFC, and after NFC
  std::vector<Id> before_, behind_;    ///< special tokens before and after a text (add_special)
  absl::flat_hash_map<Id, Token> tokens_;
  absl::flat_hash_map<std::string, Id> ids_;  ///< keys are spelled as in the file
  std::int64_t vocab_size_ = 0;
};

}  // namespace tessera
