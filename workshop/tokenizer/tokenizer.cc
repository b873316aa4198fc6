#include "workshop/tokenizer/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "runtime/base/status.h"
#include "workshop/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr std::size_t kMostCached = std::size_t{1} << 16;  ///< number of words
constexpr std::size_t kLongestCached = 64;                 ///< bytes of the longest word
/// The number of bytes that are normalised at once. Text may be cut before a line feed, since a line feed joins with no
/// character.
constexpr std::size_t kComposedBytes = std::size_t{1} << 20;

/// Returns whether NFC may change the text. Characters below U+0300 are in NFC, and do not join with each other.
bool may_change(std::string_view text) {
  return std::ranges::any_of(text, [](char c) { return static_cast<unsigned char>(c) >= 0xCC; });
}

/// Sorts marks that follow each other into Unicode's order. Normalising would do this too, but with a sort whose time
/// grows with the square of the number of marks.
std::string with_sorted_marks(std::string_view text) {
  struct Mark {
    int order;  ///< utf8proc's combining class; 0: no mark
    std::string_view bytes;
  };
  std::string result;
  std::vector<Mark> marks;
  const auto append_marks = [&] {
    std::ranges::stable_sort(marks, {}, &Mark::order);
    for (const Mark& mark : marks) result += mark.bytes;
    marks.clear();
  };
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto code = static_cast<utf8proc_int32_t>(code_point(text, length));
    const std::string_view bytes = text.substr(0, length);
    const int order = utf8proc_get_property(code)->combining_class;
    if (order == 0) {
      append_marks();
      result += bytes;
    } else {
      marks.push_back({order, bytes});
    }
    text.remove_prefix(length);
  }
  append_marks();
  return result;
}

void append_composed(std::string_view text, std::string& result) {
  if (!may_change(text)) {
    result += text;
    return;
  }
  const std::string sorted = with_sorted_marks(text);
  utf8proc_uint8_t* composed = nullptr;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const utf8proc_ssize_t bytes = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(sorted.data()),
                                              static_cast<utf8proc_ssize_t>(sorted.size()), &composed, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, std::free);
  if (bytes < 0) throw std::bad_alloc();  // valid UTF-8 has no other failure
  result.append(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(bytes));
}

std::string composed_of(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    std::size_t end = text.size() <= kComposedBytes ? text.size() : text.find('\n', kComposedBytes);
    end = std::min(end, text.size());
    append_composed(text.substr(0, end), result);
    text.remove_prefix(end);
  }
  return result;
}

}  // namespace

std::optional<Tokenizer::Id> Tokenizer::id_of(const std::string& token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

absl::StatusOr<std::size_t> Tokenizer::encode(std::string_view text, bool add_special, std::vector<Id>& ids) const {
  std::string buffer;
  std::size_t replaced = 0;
  const std::string_view valid = valid_utf8(text, buffer, replaced);
  Cache cache;
  StepBudget budget(valid.size());
  absl::Status status;
  if (add_special) ids.insert(ids.end(), before_.begin(), before_.end());
  TESSERA_RETURN_IF_ERROR(as_written_.split(valid, budget, [&](std::string_view part, std::optional<Id> token) {
    if (token) {
      ids.push_back(*token);
    } else if (status.ok()) {
      status = encode_normalized(part, budget, cache, ids);
    }
  }));
  if (add_special) ids.insert(ids.end(), behind_.begin(), behind_.end());
  if (!status.ok()) return status;
  return replaced;
}

absl::Status Tokenizer::encode_normalized(std::string_view text, StepBudget& budget, Cache& cache,
                                          std::vector<Id>& ids) const {
  const std::string composed = composes_ && may_change(text) ? composed_of(text) : "";
  absl::Status status;
  const std::string_view normal = composed.empty() ? text : composed;
  TESSERA_RETURN_IF_ERROR(composed_.split(normal, budget, [&](std::string_view part, std::optional<Id> token) {
    if (token) {
      ids.push_back(*token);
    } else if (status.ok()) {
      status = encode_pieces(part, 0, budget, cache, ids);
    }
  }));
  return status;
}

absl::Status Tokenizer::encode_pieces(std::string_view text, std::size_t cutter, StepBudget& budget, Cache& cache,
                                      std::vector<Id>& ids) const {
  std::string prefixed;
  if (adds_prefix_space_ && cutter == prefix_space_at_ && !text.starts_with(' ')) {
    prefixed = " ";
    prefixed += text;
    text = prefixed;
  }
  if (cutter == cutters_.size()) {
    encode_word(text, cache, ids);
    return absl::OkStatus();
  }
  const PieceCutter& step = cutters_[cutter];
  absl::Status status;
  TESSERA_RETURN_IF_ERROR(step.pattern.split(text, budget, [&](std::string_view piece, bool is_match) {
    const bool removed = step.removes_matches && is_match != step.inverted;
    if (!removed && status.ok()) status = encode_pieces(piece, cutter + 1, budget, cache, ids);
  }));
  return status;
}

void Tokenizer::encode_word(std::string_view word, Cache& cache, std::vector<Id>& ids) const {
  if (word.size() > kLongestCached) return bpe_.encode(word, ids);
  if (const auto known = cache.find(absl::string_view(word.data(), word.size())); known != cache.end()) {
    ids.insert(ids.end(), known->second.begin(), known->second.end());
    return;
  }
  const std::size_t begin = ids.size();
  bpe_.encode(word, ids);
  if (cache.size() < kMostCached)
    cache.emplace(word, std::vector<Id>(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end()));
}

std::string Tokenizer::decode(std::span<const std::int64_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int64_t id : ids) {
    if (id < 0 || id >= vocab_size_) continue;
    const auto token = tokens_.find(static_cast<Id>(id));
    if (token != tokens_.end() && !(skip_special && token->second.is_special)) bytes += token->second.bytes;
  }
  std::string buffer;
  std::size_t replaced = 0;
  return std::string(valid_utf8(bytes, buffer, replaced));
}

}  // namespace tessera
