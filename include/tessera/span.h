#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

namespace tessera {

/// Records spans of time while a trace is on, for a picture of a step. One recorder serves a process with all its
/// threads; every call is safe from any thread.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;  ///< a clock that all processes of a host share

  /// Forgets what was recorded, and starts recording.
  static void start();
  /// Stops recording; what was recorded stays.
  static void stop() { on_.store(false, std::memory_order_relaxed); }
  /// Returns whether a recording is on.
  static bool on() { return on_.load(std::memory_order_relaxed); }
  /// Adds a span of this thread, named "what subject". Callers check `on()` first.
  static void record(std::string_view what, std::string_view subject, Clock::time_point begin, Clock::time_point end);

  /// Is told of each Span when it begins and when it ends, both times on the Span's thread. A profiler makes its ranges
  /// from these calls.
  struct Listener {
    /// Returns the argument that `end` is to get. Null: nobody wants this span, and `end` is not called for it.
    void* (*begin)(std::string_view what, std::string_view subject) noexcept;
    void (*end)(void* range) noexcept;
  };
  /// Spans that begin from now on are told to `listener`, which must live as long as the process. Null: nobody is told.
  /// An Engine sets a listener that makes ranges for LibTorch's profilers.
  static void tell(const Listener* listener) { listener_.store(listener, std::memory_order_release); }
  static const Listener* listener() { return listener_.load(std::memory_order_acquire); }

  /// Returns the recorded spans as elements of "traceEvents" in Chrome's trace format (complete events, times in
  /// microseconds), separated by commas. `process` is the pid of all of them. Threads count from 0 in the order in
  /// which they first recorded. A name says what was done and to what: "all_gather blocks.3".
  static std::string events_as_json(int process);

 private:
  static std::atomic<bool> on_;
  static std::atomic<const Listener*> listener_;
};

/// Measures its own lifetime: records it while a trace is on, adds it, in seconds, to `*seconds` unless that is null,
/// and tells Trace::listener of it. The time spent in the listener is not measured.
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
