#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the hash that a checkpoint keeps of bytes, to notice when they change: XXH3 of 64 bits with seed 0
/// (https://xxhash.com), as `xxhsum -H3` prints it. It finds damage, not forgery.
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
  /// Returns the hash of everything that was added.
  std::uint64_t value() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

/// Returns the hash as text: 16 hexadecimal digits, the most significant first.
std::string hash_text(std::uint64_t hash);
/// Reads a text that `hash_text` made. Returns false if `text` is anything else.
bool read_hash(std::string_view text, std::uint64_t& hash);

}  // namespace tessera
