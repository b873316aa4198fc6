#include "runtime/comm/shared/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera {

static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds timeout,
                bool shared) {
  timespec limit{};
  limit.tv_sec = timeout.count() / 1000;
  limit.tv_nsec = timeout.count() % 1000 * 1'000'000;
  // The caller reads the word again, for whatever reason this wait ended.
  syscall(SYS_futex, &word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word, bool shared) {
  syscall(SYS_futex, &word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tessera
