#pragma once

#include <absl/container/flat_hash_map.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// Byte pair encoding (Sennrich et al., arXiv 1508.07909) over bytes. A word's bytes are the first tokens. Then the
/// pair that was learned earliest is joined, the leftmost such pair first, until no pair can be joined. The object is
/// immutable and thread-safe.
class BytePairEncoding {
 public:
  using Id = std::uint32_t;
  struct Parts {
    std::vector<std::pair<std::string, Id>> tokens;           ///< content as bytes, each once
    std::vector<std::pair<std::string, std::string>> merges;  ///< ordered as learned; the joined bytes must be a token
    bool ignore_merges = false;                               ///< a word that is a token becomes that token
  };
  /// Errors: 65 if a byte of UTF-8 is no token, if a merge joins texts that are no tokens, or if the joined text is no
  /// token.
  static absl::StatusOr<BytePairEncoding> make(const Parts& parts);

  /// Appends the tokens of a word. The function takes time proportional to n log n for n bytes.
  void encode(std::string_view word, std::vector<Id>& ids) const;

 private:
  struct Merge {
    std::uint32_t rank = kNone;
    Id joined = 0;
  };
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static std::uint64_t key_of(Id left, Id right) { return std::uint64_t{left} << 32 | right; }
  Merge merge_of(Id left, Id right) const {
    const auto found = merges_.find(key_of(left, right));
    return found == merges_.end() ? Merge{} : found->second;
  }
  void encode_short(std::vector<Id>& symbols) const;
  void encode_long(std::vector<Id>& symbols) const;

  std::array<Id, 256> bytes_{};
  absl::flat_hash_map<std::uint64_t, Merge> merges_;
  absl::flat_hash_map<std::string, Id> words_;  ///< this is used with ignore_merges
};

}  // namespace tessera
