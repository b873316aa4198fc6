#include "engine/asynchronous/wild_words.h"

#include <atomic>
#include <bit>

namespace tessera {
namespace {

using Word = std::atomic_ref<float>;
static_assert(Word::is_always_lock_free && Word::required_alignment == sizeof(float));

constexpr auto kRelaxed = std::memory_order_relaxed;

/// A Word cannot be made for const memory, so the const is cast away. This function only reads the memory.
float load(const float& word) { return Word(const_cast<float&>(word)).load(kRelaxed); }

bool same_bits(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

}  // namespace

void read_words(const float* shared, float* own, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) own[i] = load(shared[i]);
}

void write_words(float* shared, const float* before, const float* after, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (!same_bits(before[i], after[i])) Word(shared[i]).store(after[i], kRelaxed);
  }
}

void merge_words(float* shared, const float* before, const float* after, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (same_bits(before[i], after[i])) continue;
    const float now = load(shared[i]);
    Word(shared[i]).store(same_bits(now, before[i]) ? after[i] : now + (after[i] - before[i]), kRelaxed);
  }
}

}  // namespace tessera
