#include "engine/job/outcomes.h"

#include <charconv>
#include <cstddef>
#include <exception>

#include "engine/job/last_words.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"

namespace tessera {
namespace {

constexpr std::size_t kMostMessageBytes = 16384;
constexpr char kSeparator = ' ';  // this character stands between the exit code and the text

/// Returns the result of `body`, or the status of the exception that `body` throws.
template <class Result>
Result caught(const std::function<Result()>& body) {
  try {
    return body();
  } catch (...) {
    return status_of(std::current_exception());
  }
}

std::string text_of_outcome(const absl::StatusOr<std::string>& own) {
  if (own.ok()) return "0" + (kSeparator + *own);
  return std::to_string(static_cast<int>(exit_code_of(own.status()))) + kSeparator +
         clipped(message_of(own.status()), kMostMessageBytes);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> share_outcomes(Collectives& control, std::string_view label,
                                                        const std::function<absl::StatusOr<std::string>()>& body) {
  std::vector<std::string> texts = value_or_throw(gather_strings(control, label, text_of_outcome(caught(body))));
  std::vector<int> failed;
  absl::Status first;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    int code = 0;
    const std::size_t end = texts[rank].find(kSeparator);
    std::from_chars(texts[rank].data(), texts[rank].data() + end, code);
    texts[rank].erase(0, end + 1);
    if (code == 0) continue;
    if (failed.empty()) first = make_error(static_cast<ExitCode>(code), texts[rank]);
    failed.push_back(static_cast<int>(rank));
  }
  if (failed.empty()) return texts;
  if (failed.size() == 1) return first;
  failed.erase(failed.begin());
  return make_error(exit_code_of(first), message_of(first) + " (and ranks " + number_ranges(failed) + " failed too)");
}

absl::Status share_status(Collectives& control, std::string_view label, const absl::Status& own) {
  const auto outcome = [&] { return own.ok() ? absl::StatusOr<std::string>("") : own; };
  return share_outcomes(control, label, outcome).status();
}

absl::Status status_from(const std::function<absl::Status()>& body) { return caught(body); }

}  // namespace tessera
