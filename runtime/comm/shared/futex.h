#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera {

/// Sleeps on a word of memory (futex(2)); `shared` says whether several processes map the word. Returns at once unless
/// `*word == seen`. Otherwise it returns after a wake, a signal or `timeout`.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds timeout,
                bool shared);
/// Wakes all sleepers.
void futex_wake(const std::atomic<std::uint32_t>& word, bool shared);

}  // namespace tessera
