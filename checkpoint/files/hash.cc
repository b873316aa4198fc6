#include "checkpoint/files/hash.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>

namespace tessera {
namespace {

constexpr std::size_t kDigits = 16;

bool is_lower_hex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

}  // namespace

std::uint64_t checkpoint_hash(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }
std::uint64_t checkpoint_hash(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

struct RunningHash::State {
  XXH3_state_t state;
};

RunningHash::RunningHash() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->state); }
RunningHash::~RunningHash() = default;
void RunningHash::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->state, bytes.data(), bytes.size());
}
std::uint64_t RunningHash::value() const { return XXH3_64bits_digest(&state_->state); }

std::string hash_text(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

bool read_hash(std::string_view text, std::uint64_t& hash) {
  if (text.size() != kDigits || !std::ranges::all_of(text, is_lower_hex)) return false;
  std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  return true;
}

}  // namespace tessera
