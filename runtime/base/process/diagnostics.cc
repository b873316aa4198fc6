#include "runtime/base/process/diagnostics.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool is_inside(std::string_view pointer, std::string_view holder) {
  return pointer.starts_with(holder) && (pointer.size() == holder.size() || pointer[holder.size()] == '/');
}

}  // namespace

Diagnostics::Diagnostics(std::string name, std::string_view text) : name_(std::move(name)), text_(text) {
  line_starts_.push_back(text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') line_starts_.push_back(i + 1);
  }
}

void Diagnostics::add(std::size_t offset, std::string pointer, std::string message, std::size_t related) {
  problems_.push_back({std::min(offset, text_.size()), std::move(pointer), std::move(message), related});
}

bool Diagnostics::touches(std::string_view pointer) const {
  return std::any_of(problems_.begin(), problems_.end(), [&](const Problem& problem) {
    return is_inside(problem.pointer, pointer) || is_inside(pointer, problem.pointer);
  });
}

std::string Diagnostics::line_and_column(std::size_t offset) const {
  const auto after = std::upper_bound(line_starts_.begin() + 1, line_starts_.end(), offset);
  const std::size_t start = std::min(*(after - 1), offset);
  const std::size_t column = text_width(text_.substr(start, offset - start)) + 1;
  return fmt::format("{}:{}", after - line_starts_.begin(), column);
}

std::string Diagnostics::line_of(const Problem& problem) const {
  const std::string related = problem.related == kNowhere ? "" : " " + line_and_column(problem.related);
  return fmt::format("{}:{}: {}: {}{}", name_, line_and_column(problem.offset),
                     problem.pointer.empty() ? "/" : problem.pointer, problem.message, related);
}

absl::Status Diagnostics::to_status(const std::string& hint) const {
  if (problems_.empty()) return absl::OkStatus();
  std::vector<const Problem*> sorted;
  for (const Problem& problem : problems_) sorted.push_back(&problem);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Problem* a, const Problem* b) { return a->offset < b->offset; });

  std::vector<std::string> lines;
  for (std::size_t i = 0; i < std::min(sorted.size(), kMaxReported); ++i) lines.push_back(line_of(*sorted[i]));
  if (sorted.size() > kMaxReported) {
    lines.push_back(fmt::format("{}: and {} more errors", name_, sorted.size() - kMaxReported));
  }
  const std::string problems = joined(lines, "\n");
  const bool has_its_own = hint.empty() || has_hint(problems);
  return make_error(ExitCode::kConfig, has_its_own ? problems : problems + "\n" + hint);
}

}  // namespace tessera
