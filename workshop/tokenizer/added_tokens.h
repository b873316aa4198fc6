#pragma once

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "workshop/tokenizer/split_pattern.h"

namespace tessera {

/// Tokens that are found in text before it is cut into words, such as "[BOS]". The leftmost token is taken, and the
/// longest one if several begin at the same place.
class AddedTokens {
 public:
  /// Adds a token. REQUIRES: content is not empty.
  void add(std::string content, std::uint32_t id);
  bool empty() const { return tokens_.empty(); }

  /// Calls `piece(part, token)` for all of `text` in order. `token` is empty for text between tokens. `budget` is the
  /// budget of the whole text. Errors: 65 if it is too small, since many places of the text begin like long tokens.
  absl::Status split(std::string_view text, StepBudget& budget,
                     absl::FunctionRef<void(std::string_view, std::optional<std::uint32_t>)> piece) const;

 private:
  struct Token {
    std::string content;
    std::uint32_t id;
  };
  const Token* longest_at(std::string_view text, std::size_t& steps) const;

  std::vector<Token> tokens_;  ///< ordered by content
  bool begins_[256] = {};      ///< [byte]: whether a token begins with this byte
};

}  // namespace tessera
