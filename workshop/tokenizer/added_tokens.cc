#include "workshop/tokenizer/added_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace tessera {

void AddedTokens::add(std::string content, std::uint32_t id) {
  begins_[static_cast<unsigned char>(content[0])] = true;
  const auto place = std::ranges::lower_bound(tokens_, content, {}, &Token::content);
  tokens_.insert(place, Token{std::move(content), id});
}

/// Returns the longest token with which the text begins. Tokens are ordered by content, so tokens with the same
/// beginning are neighbours. Each further byte of the text can only remove candidates. Adds to `steps` the number of
/// bytes looked at.
const AddedTokens::Token* AddedTokens::longest_at(std::string_view text, std::size_t& steps) const {
  auto begin = tokens_.begin(), end = tokens_.end();
  const Token* longest = nullptr;
  for (std::size_t i = 0; i < text.size() && begin != end; ++i) {
    ++steps;
    const auto byte_of = [i](const Token& token) {
      return i < token.content.size() ? static_cast<int>(static_cast<unsigned char>(token.content[i])) : -1;
    };
    const int byte = static_cast<unsigned char>(text[i]);
    begin = std::ranges::lower_bound(begin, end, byte, {}, byte_of);
    end = std::ranges::upper_bound(begin, end, byte, {}, byte_of);
    if (begin != end && begin->content.size() == i + 1) longest = &*begin;
  }
  return longest;
}

absl::Status AddedTokens::split(std::string_view text, StepBudget& budget,
                                absl::FunctionRef<void(std::string_view, std::optional<std::uint32_t>)> piece) const {
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size() && !tokens_.empty();) {
    std::size_t steps = 0;
    const bool may_begin = begins_[static_cast<unsigned char>(text[i])];
    const Token* const token = may_begin ? longest_at(text.substr(i), steps) : nullptr;
    if (!budget.take(steps))
      return make_error(ExitCode::kCorruptData,
                        fmt::format("added_tokens cannot be looked for in {} bytes of text: it takes too many steps. "
                                    "[T1061] hint: leave out long tokens that begin like much of the text",
                                    budget.text_bytes()));
    if (token == nullptr) {
      ++i;
      continue;
    }
    if (i > done) piece(text.substr(done, i - done), std::nullopt);
    piece(text.substr(i, token->content.size()), token->id);
    i += token->content.size();
    done = i;
  }
  if (done < text.size()) piece(text.substr(done), std::nullopt);
  return absl::OkStatus();
}

}  // namespace tessera
