#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the hash by which a checkpoint notices changes of bytes: XXH3 with 64 bits and seed 0 (https://xxhash.com),
/// as `xxhsum -H3` prints it. It detects damage, not forgery.
std::uint64_t checkpoint_hash(std::span<const std::byte> bytes);
std::uint64_t checkpoint_hash(std::string_view text);

/// Computes the hash that checkpoint_hash returns, for bytes that are given in several parts.
class RunningHash {
 public:
  RunningHash();
  RunningHash(const RunningHash&) = delete;
  RunningHash& operator=(const RunningHash&) = delete;
  ~RunningHash();

  /// Adds bytes that follow the bytes added before.
  void add(std::span<const std::byte> bytes);
  /// Returns the hash of all bytes that were added.
  std::uint64_t value() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

/// Returns the hash as text: 16 hexadecimal digits, the most significant digit first.
std::string hash_text(std::uint64_t hash);
/// Reads a text that `hash_text` made. Returns false if `hash_text` cannot have made `text`.
bool read_hash(std::string_view text, std::uint64_t& hash);

}  // namespace tessera
