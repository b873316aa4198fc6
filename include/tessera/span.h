#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

namespace tessera {

/// Spans of time, recorded while a trace is on: for a picture of a step. One recorder a process, for all its threads.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;  ///< the same for all processes of a host

  /// Forgets what was recorded, and records from now on.
  static void start();
  static void stop() { on_.store(false, std::memory_order_relaxed); }
  static bool on() { return on_.load(std::memory_order_relaxed); }
  static void record(std::string_view what, std::string_view subject, Clock::time_point begin, Clock::time_point end);

  /// What was recorded, as elements of "traceEvents" in Chrome's trace format (complete events, microseconds),
  /// separated by commas. `process` is the pid of all of them; threads count from 0 in the order in which they first
  /// recorded. Names are what was done and to what: "all_gather blocks.3".
  static std::string events_as_json(int process);

 private:
  static std::atomic<bool> on_;
};

/// Measures its own lifetime: records it while a trace is on, and adds it to `seconds` if that is given.
class Span {
 public:
  /// `what` and `subject` must outlive it.
  explicit Span(std::string_view what, std::string_view subject = {}, double* seconds = nullptr)
      : what_(what), subject_(subject), seconds_(seconds), begin_(Trace::Clock::now()) {}
  ~Span() {
    if (!seconds_ && !Trace::on()) return;
    const Trace::Clock::time_point end = Trace::Clock::now();
    if (seconds_) *seconds_ += std::chrono::duration<double>(end - begin_).count();
    if (Trace::on()) Trace::record(what_, subject_, begin_, end);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const std::string_view what_, subject_;
  double* const seconds_;
  const Trace::Clock::time_point begin_;
};

}  // namespace tessera
