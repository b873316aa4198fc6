#include "workshop/tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr std::size_t kMostExpressionBytes = std::size_t{1} << 14;
constexpr std::size_t kFirstStack = std::size_t{32} << 10,
                      kMostStack = std::size_t{16} << 20;  // sizes of the compiled matcher's stack
constexpr std::uint32_t kMostHeapKib = 64 << 10;           // heap of the interpreting matcher
/// Unicode's White_Space: PCRE2's \s also has U+180E, which no longer has this property in Unicode.
constexpr std::string_view kSpace = R"(\p{Z}\t-\r\x{85})";

constexpr const char kExpressionHint[] =
    ". [T0611] hint: docs/huggingface.md says how a tokenizer may cut text into words";

absl::Status refused(const std::string& expression, const std::string& what) {
  return make_error(ExitCode::kCorruptData,
                    "the expression " + quoted_text(expression, 200) + " " + what + kExpressionHint);
}

/// Translates the expression for PCRE2.
absl::StatusOr<std::string> translated(const std::string& expression) {
  std::string result;
  bool in_class = false;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    const char next = i + 1 < expression.size() ? expression[i + 1] : '\0';
    if (c == '\\' && next != '\0') {
      ++i;
      const std::string_view others_mean = "wWbBhHRXkGKAZCN";
      if (others_mean.find(next) != std::string_view::npos)
        return refused(expression, fmt::format("has \\{}, which is not supported", next));
      if (next == 's') {
        result += in_class ? std::string(kSpace) : fmt::format("[{}]", kSpace);
      } else if (next == 'S' && !in_class) {
        result += fmt::format("[^{}]", kSpace);
      } else {
        result += {c, next};
      }
      continue;
    }
    if (in_class && ((c == '&' && next == '&') || c == '['))
      return refused(expression, "has a class inside a class or &&, which is not supported");
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    result += c;
  }
  return result;
}

}  // namespace

struct SplitPattern::Compiled {
  std::string expression;
  pcre2_code* code = nullptr;
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;

  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
    pcre2_code_free(code);
  }
};

SplitPattern::SplitPattern(std::unique_ptr<Compiled> compiled) : compiled_(std::move(compiled)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

absl::StatusOr<SplitPattern> SplitPattern::compile(const std::string& expression) {
  if (expression.size() > kMostExpressionBytes)
    return refused(expression, fmt::format("has {} bytes, wanted {} at most", expression.size(), kMostExpressionBytes));
  TESSERA_ASSIGN_OR_RETURN(const std::string ours, translated(expression));
  auto compiled = std::make_unique<Compiled>();
  compiled->expression = expression;
  pcre2_compile_context* const context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE place = 0;
  constexpr std::uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_ALLOW_EMPTY_CLASS;
  compiled->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(ours.data()), ours.size(), kOptions, &error, &place, context);
  pcre2_compile_context_free(context);
  if (compiled->code == nullptr) {
    PCRE2_UCHAR text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    return refused(expression, fmt::format("is not understood: {} (at byte {} of {})",
                                           reinterpret_cast<const char*>(text), place, quoted_text(ours, 200)));
  }
  // Patterns are interpreted if there is no compiler for this processor.
  pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
  compiled->match = pcre2_match_data_create_from_pattern(compiled->code, nullptr);
  compiled->context = pcre2_match_context_create(nullptr);
  pcre2_set_heap_limit(compiled->context, kMostHeapKib);
  compiled->stack = pcre2_jit_stack_create(kFirstStack, kMostStack, nullptr);
  pcre2_jit_stack_assign(compiled->context, nullptr, compiled->stack);
  return SplitPattern(std::move(compiled));
}

namespace {

/// Returns a place in `text` at or before `place` where a character begins.
std::size_t begin_of_character(std::string_view text, std::size_t place) {
  while (place < text.size() && (static_cast<unsigned char>(text[place]) & 0xC0) == 0x80) --place;
  return place;
}

}  // namespace

/// Looks for matches in one text, from front to back, in time that is linear in the text's length.
///
/// PCRE2 limits the steps of a search, but it counts them anew at each character where a match may begin. It does not
/// count the steps of a repeat of one character ("\s+"). A search therefore gets only a window of the text, and gets
/// few steps for each character. If these steps do not suffice (for a long word), characters are tried one by one with
/// a larger window and more steps. These steps count against the text's budget.
class SplitPattern::Search {
 public:
  Search(Compiled& compiled, std::string_view text, StepBudget& budget)
      : compiled_(compiled), text_(text), budget_(budget) {}

  struct Match {
    std::size_t begin = 0, end = 0;
  };
  /// Returns the first match at or after `from` that is not empty, or an empty match if there is none.
  absl::StatusOr<Match> next(std::size_t from) {
    grant_least();
    while (from < text_.size()) {
      const std::size_t window_end = begin_of_character(text_, std::min(text_.size(), from + window_));
      const bool is_careful = from < careful_until_ || window_ > kLeastWindow;
      const int found = search(from, window_end, is_careful);
      const Match match = found >= 0 || found == PCRE2_ERROR_PARTIAL ? Match{ends()[0], ends()[1]} : Match{};
      if (found == PCRE2_ERROR_MATCHLIMIT && !is_careful) {
        careful_until_ = window_end;
      } else if (found == PCRE2_ERROR_MATCHLIMIT) {
        steps_ = std::min(kGrowth * steps_, kMostSteps);
        TESSERA_RETURN_IF_ERROR(take(steps_));
      } else if (found == PCRE2_ERROR_PARTIAL && match.begin > from) {
        from = match.begin;  // nothing matches before this place
        grant_least();
      } else if (found == PCRE2_ERROR_PARTIAL) {
        window_ *= kGrowth;
        TESSERA_RETURN_IF_ERROR(take(std::min(window_, text_.size() - from)));
      } else if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
        return too_long(fmt::format("PCRE2's error {}", found));
      } else if (found >= 0 && match.end > match.begin) {
        return match;
      } else {  // an empty match cuts nothing, and may be due to the window's end
        const std::size_t seen = found >= 0 ? match.begin : is_careful ? from : window_end;
        from = seen < window_end ? seen + utf8_length(text_.substr(seen)) : window_end;
        grant_least();
      }
    }
    return Match{};
  }

 private:
  // The smallest limits of one search: the number of steps, and the bytes of text that are searched.
  static constexpr std::size_t kLeastSteps = 128, kLeastWindow = 1024;
  static constexpr std::size_t kMostSteps = 10'000'000, kGrowth = 4;

  const PCRE2_SIZE* ends() const { return pcre2_get_ovector_pointer(compiled_.match); }

  void grant_least() {
    steps_ = kLeastSteps;
    window_ = kLeastWindow;
  }

  int search(std::size_t from, std::size_t window_end, bool is_careful) {
    pcre2_set_match_limit(compiled_.context, static_cast<std::uint32_t>(steps_));
    const std::uint32_t options =
        PCRE2_NO_UTF_CHECK | (is_careful ? PCRE2_ANCHORED : 0U) | (window_end < text_.size() ? PCRE2_PARTIAL_HARD : 0U);
    return pcre2_match(compiled_.code, reinterpret_cast<PCRE2_SPTR>(text_.data()), window_end, from, options,
                       compiled_.match, compiled_.context);
  }

  absl::Status take(std::size_t steps) {
    return budget_.take(steps) ? absl::OkStatus() : too_long(fmt::format("{} bytes of text", budget_.text_bytes()));
  }

  absl::Status too_long(const std::string& where) const {
    return refused(compiled_.expression, fmt::format("cannot be matched ({}): it takes too many steps", where));
  }

  Compiled& compiled_;
  const std::string_view text_;
  StepBudget& budget_;
  std::size_t steps_ = kLeastSteps, window_ = kLeastWindow;
  std::size_t careful_until_ = 0;  ///< characters before this offset are tried one by one
};

absl::Status SplitPattern::split(std::string_view text, StepBudget& budget,
                                 absl::FunctionRef<void(std::string_view, bool)> piece) const {
  Search search(*compiled_, text, budget);
  std::size_t done = 0;  // text before this place was passed to `piece`
  while (true) {
    TESSERA_ASSIGN_OR_RETURN(const Search::Match match, search.next(done));
    if (match.end == 0) break;
    if (match.begin > done) piece(text.substr(done, match.begin - done), false);
    piece(text.substr(match.begin, match.end - match.begin), true);
    done = match.end;
  }
  if (done < text.size()) piece(text.substr(done), false);
  return absl::OkStatus();
}

}  // namespace tessera
