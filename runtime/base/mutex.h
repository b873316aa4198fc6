#pragma once

#include <absl/base/thread_annotations.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace tessera {

/// A std::mutex that Clang recognises as a mutex: -Wthread-safety reports code that uses a member marked
/// ABSL_GUARDED_BY without holding the mutex.
///
/// Tessera does not use absl::Mutex, because ThreadSanitizer cannot observe a library that was compiled without
/// ThreadSanitizer, such as the Abseil of distributions. ThreadSanitizer would report a race for everything that an
/// absl::Mutex guards. ThreadSanitizer does observe std::mutex, because it replaces pthread's functions.
class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  /// Tells Clang that the caller holds the mutex. Use it in functions that other code calls back, where Clang cannot
  /// see that the mutex is held. It does nothing at run time.
  void expect_held() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

/// Holds a mutex while it lives.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  [[nodiscard]] explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// A std::condition_variable. Put the condition into a loop around the wait, as in the line below. Clang sees that the
/// mutex is held in such a loop, but not in a predicate.
///
///     while (!has_come_) changed_.wait(mutex_);
class CondVar {
 public:
  /// Returns after a notification, or at any time (spurious wake-up).
  void wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  /// Waits as `wait` does, but no later than `deadline`. Returns false after the deadline has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool is_in_time = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return is_in_time;
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace tessera
