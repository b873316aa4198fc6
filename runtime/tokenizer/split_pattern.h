#pragma once

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <memory>
#include <string>
#include <string_view>

namespace tessera {

/// A regular expression that cuts text into words, in the syntax that tokenizer.json has (Oniguruma's) as far as PCRE2
/// means the same by it: `\s` is Unicode's White_Space, `\p{L}` a general category, `^` and `$` are ends of lines. What
/// would mean something else (`\w`, `\h`, `\b`, `&&` in a class) is refused. One thread at a time.
class SplitPattern {
 public:
  /// 65 where PCRE2 does not understand the expression, with the place.
  static absl::StatusOr<SplitPattern> compile(const std::string& expression);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  /// Calls `piece(part, is_match)` for the matches and for what lies between them, in order; none is empty. REQUIRES:
  /// `text` is UTF-8. The work is linear in the text, whatever the expression: 65 where it would need more.
  absl::Status split(std::string_view text, absl::FunctionRef<void(std::string_view, bool)> piece) const;

 private:
  struct Compiled;
  class Search;
  explicit SplitPattern(std::unique_ptr<Compiled> compiled);
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tessera
