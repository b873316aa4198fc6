#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

namespace tessera {

/// Records spans of time while a trace is on, for a timeline of a step. There is one recorder for all threads of a
/// process. Any thread may make any call.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;  ///< a clock that all processes of a host share

  /// Forgets the recorded spans, and starts recording.
  static void start();
  /// Stops recording. The recorded spans stay.
  static void stop() { on_.store(false, std::memory_order_relaxed); }
  /// Returns whether spans are being recorded.
  static bool on() { return on_.load(std::memory_order_relaxed); }
  /// Adds a span of this thread, named "what subject". Callers check `on()` first.
  static void record(std::string_view what, std::string_view subject, Clock::time_point begin, Clock::time_point end);

  /// Functions that are called when a Span begins and when it ends, both on the Span's thread. A profiler can make its
  /// ranges from these calls.
  struct Listener {
    /// Returns the argument for `end`. If it is null, `end` is not called for this span.
    void* (*begin)(std::string_view what, std::string_view subject) noexcept;
    /// Gets the value that `begin` returned for the same span.
    void (*end)(void* range) noexcept;
  };
  /// Makes all later spans call `listener`, which must live as long as the process. If it is null, spans call no
  /// listener. An Engine sets a listener that makes ranges for LibTorch's profilers.
  static void tell(const Listener* listener) { listener_.store(listener, std::memory_order_release); }
  /// Returns the listener, or null.
  static const Listener* listener() { return listener_.load(std::memory_order_acquire); }

  /// Returns the recorded spans as elements of "traceEvents" in Chrome's trace format (complete events, times in
  /// microseconds), separated by commas. `process` is the pid of all spans. Threads are numbered from 0 in the order in
  /// which they first recorded a span. A name has the action and its subject: "all_gather blocks.3".
  static std::string events_as_json(int process);

 private:
  static std::atomic<bool> on_;
  static std::atomic<const Listener*> listener_;
};

/// Measures its own lifetime. It records the lifetime if a trace is on, and adds the seconds to `*seconds` unless
/// `seconds` is null. It also calls the functions of the listener (Trace::tell). The time spent in the listener is not
/// measured.
class Span {
 public:
  /// `what` and `subject` must outlive the span.
  explicit Span(std::string_view what, std::string_view subject = {}, double* seconds = nullptr)
      : what_(what),
        subject_(subject),
        seconds_(seconds),
        listener_(Trace::listener()),
        range_(listener_ ? listener_->begin(what, subject) : nullptr),
        begin_(Trace::Clock::now()) {}
  ~Span() {
    if (seconds_ || Trace::on()) note_end();
    if (range_) listener_->end(range_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void note_end() const {
    const Trace::Clock::time_point end = Trace::Clock::now();
    if (seconds_) *seconds_ += std::chrono::duration<double>(end - begin_).count();
    if (Trace::on()) Trace::record(what_, subject_, begin_, end);
  }

  const std::string_view what_, subject_;
  double* const seconds_;
  const Trace::Listener* const listener_;
  void* const range_;
  const Trace::Clock::time_point begin_;
};

}  // namespace tessera
