#include "workshop/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>
#include <tuple>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kShort = 48;  ///< up to this many bytes, searching all pairs is faster than a queue

/// Returns whether no UTF-8 text has the byte.
bool is_never_in_utf8(int byte) { return byte == 0xC0 || byte == 0xC1 || byte >= 0xF5; }

}  // namespace

absl::StatusOr<BytePairEncoding> BytePairEncoding::make(const Parts& parts) {
  BytePairEncoding result;
  absl::flat_hash_map<absl::string_view, Id> ids;
  for (const auto& [token, id] : parts.tokens) ids.emplace(token, id);
  const auto id_of = [&](const std::string& token) {
    const auto found = ids.find(token);
    return found == ids.end() ? kNone : found->second;
  };
  const auto corrupt = [](const std::string& what) { return make_error(ExitCode::kCorruptData, what); };
  for (int byte = 0; byte < 256; ++byte) {
    const Id id = id_of(std::string(1, static_cast<char>(byte)));
    if (id == kNone && !is_never_in_utf8(byte))
      return corrupt(
          fmt::format("the vocabulary has no token for the byte {:#04x}, so some text has no tokens. [T0609] hint: "
                      "train it with the initial alphabet of ByteLevel",
                      byte));
    result.bytes_[static_cast<std::size_t>(byte)] = id == kNone ? 0 : id;
  }
  for (std::uint32_t rank = 0; rank < parts.merges.size(); ++rank) {
    const auto& [left, right] = parts.merges[rank];
    const Id a = id_of(left), b = id_of(right), joined = id_of(left + right);
    if (a == kNone || b == kNone || joined == kNone)
      return corrupt(
          fmt::format("merge {} joins {} and {}, and one of them or the two together are no token. [T0610] hint: fetch "
                      "vocabulary and merges from one source",
                      rank, quoted_text(left), quoted_text(right)));
    // if a merge is given twice, its last rank counts
    result.merges_.insert_or_assign(key_of(a, b), Merge{rank, joined});
  }
  if (parts.ignore_merges)
    for (const auto& [token, id] : parts.tokens) result.words_.emplace(token, id);
  return result;
}

void BytePairEncoding::encode(std::string_view word, std::vector<Id>& ids) const {
  if (const auto whole = words_.find(absl::string_view(word.data(), word.size())); whole != words_.end()) {
    ids.push_back(whole->second);
    return;
  }
  std::vector<Id> symbols;
  symbols.reserve(word.size());
  for (const char byte : word) symbols.push_back(bytes_[static_cast<unsigned char>(byte)]);
  word.size() <= kShort ? encode_short(symbols) : encode_long(symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

void BytePairEncoding::encode_short(std::vector<Id>& symbols) const {
  std::array<Merge, kShort> merges;  // merges of symbols i and i + 1
  std::size_t count = symbols.size();
  for (std::size_t i = 0; i + 1 < count; ++i) merges[i] = merge_of(symbols[i], symbols[i + 1]);
  while (count > 1) {
    const auto end = merges.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    const auto best =
        std::min_element(merges.begin(), end, [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    if (best->rank == kNone) break;
    const auto i = static_cast<std::size_t>(best - merges.begin());
    symbols[i] = best->joined;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    std::move(best + 1, end, best);
    --count;
    if (i > 0) merges[i - 1] = merge_of(symbols[i - 1], symbols[i]);
    if (i + 1 < count) merges[i] = merge_of(symbols[i], symbols[i + 1]);
  }
}

/// Symbols are a linked list. Pairs wait in a queue, which may also hold pairs that no longer exist.
void BytePairEncoding::encode_long(std::vector<Id>& symbols) const {
  struct Link {
    std::size_t previous, next;
  };
  const std::size_t count = symbols.size();
  std::vector<Link> links(count);
  std::vector<bool> is_gone(count, false);
  using Pair = std::tuple<std::uint32_t, std::size_t, Id>;  // rank, place of the left symbol, the joined token
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> queue;
  const auto consider = [&](std::size_t left) {
    if (left >= count || links[left].next >= count) return;
    const Merge merge = merge_of(symbols[left], symbols[links[left].next]);
    if (merge.rank != kNone) queue.emplace(merge.rank, left, merge.joined);
  };
  for (std::size_t i = 0; i < count; ++i) links[i] = {i == 0 ? count : i - 1, i + 1};
  for (std::size_t i = 0; i < count; ++i) consider(i);
  while (!queue.empty()) {
    const auto [rank, left, joined] = queue.top();
    queue.pop();
    const std::size_t right = is_gone[left] ? count : links[left].next;
    if (right >= count || merge_of(symbols[left], symbols[right]).rank != rank) continue;
    symbols[left] = joined;
    is_gone[right] = true;
    links[left].next = links[right].next;
    if (links[right].next < count) links[links[right].next].previous = left;
    consider(links[left].previous);
    consider(left);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i)
    if (!is_gone[i]) symbols[kept++] = symbols[i];
  symbols.resize(kept);
}

}  // namespace tessera
