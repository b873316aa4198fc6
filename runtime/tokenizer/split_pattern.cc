#include "runtime/tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr std::size_t kMostExpressionBytes = std::size_t{1} << 14;
constexpr std::size_t kFirstStack = std::size_t{32} << 10,
                      kMostStack = std::size_t{16} << 20;  // of the compiled matcher
/// White_Space: PCRE2's own \s has U+180E too, which Unicode took out of it.
constexpr std::string_view kSpace = R"(\p{Z}\t-\r\x{85})";

absl::Status refused(const std::string& expression, const std::string& what) {
  return make_error(ExitCode::kCorruptData, "the expression " + quoted_text(expression, 200) + " " + what);
}

/// The expression for PCRE2.
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
  pcre2_jit_compile(compiled->code,
                    PCRE2_JIT_COMPLETE);  // where there is no compiler for this processor, it is interpreted
  compiled->match = pcre2_match_data_create_from_pattern(compiled->code, nullptr);
  compiled->context = pcre2_match_context_create(nullptr);
  compiled->stack = pcre2_jit_stack_create(kFirstStack, kMostStack, nullptr);
  pcre2_jit_stack_assign(compiled->context, nullptr, compiled->stack);
  return SplitPattern(std::move(compiled));
}

absl::Status SplitPattern::split(std::string_view text, absl::FunctionRef<void(std::string_view, bool)> piece) const {
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(compiled_->match);
  std::size_t done = 0;  // text before it was handed out
  for (std::size_t from = 0; from < text.size();) {
    const int found = pcre2_match(compiled_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, compiled_->match,
                                  compiled_->context);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0)
      return refused(compiled_->expression,
                     fmt::format("cannot be matched (PCRE2's error {}): it takes too many steps", found));
    const std::size_t begin = ends[0], end = ends[1];
    if (end <= begin || begin < from) {  // a match of nothing cuts nothing
      from += utf8_length(text.substr(from));
      continue;
    }
    if (begin > done) piece(text.substr(done, begin - done), false);
    piece(text.substr(begin, end - begin), true);
    done = from = end;
  }
  if (done < text.size()) piece(text.substr(done), false);
  return absl::OkStatus();
}

}  // namespace tessera
