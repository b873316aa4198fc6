#pragma once

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace tessera {

/// The number of steps that expressions may take to cut one text. It is linear in the text's length, for every
/// expression. A fixed number of steps is added, so that expressions can cut short texts even if they search from each
/// place to the end of the text.
class StepBudget {
 public:
  explicit StepBudget(std::size_t text_bytes) : text_bytes_(text_bytes), left_(kFree + kPerByte * text_bytes) {}
  /// Takes steps. Returns false if fewer steps are left.
  bool take(std::size_t steps) {
    if (steps > left_) return false;
    left_ -= steps;
    return true;
  }
  std::size_t text_bytes() const { return text_bytes_; }

 private:
  static constexpr std::size_t kFree = std::size_t{1} << 24, kPerByte = 64;
  std::size_t text_bytes_, left_;
};

/// A regular expression that cuts text into words. It has the syntax of tokenizer.json (Oniguruma's), as far as PCRE2
/// gives it the same meaning: `\s` is Unicode's White_Space, `\p{L}` is a general category, and `^` and `$` are the
/// ends of lines. Expressions that would have another meaning (`\w`, `\h`, `\b`, `&&` in a class) are refused. One
/// thread at a time may use a SplitPattern.
class SplitPattern {
 public:
  /// Compiles the expression. Errors: 65, with the position, if PCRE2 does not understand the expression.
  static absl::StatusOr<SplitPattern> compile(const std::string& expression);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  /// Calls `piece(part, is_match)` for the matches and for the parts between matches, in order. No part is empty.
  /// REQUIRES: `text` is UTF-8. `budget` is the budget of the whole text, of which `text` may be a part. Errors: 65 if
  /// the budget is too small.
  absl::Status split(std::string_view text, StepBudget& budget,
                     absl::FunctionRef<void(std::string_view, bool)> piece) const;

 private:
  struct Compiled;
  class Search;
  explicit SplitPattern(std::unique_ptr<Compiled> compiled);
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera
