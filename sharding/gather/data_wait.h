#pragma once

#include <chrono>
#include <memory>

namespace tessera {

/// Measures how long a program waits for data: from the end of a step, or of a microbatch, to the next operator that
/// reads a parameter. A Training owns one, and begins a wait at the end of each step or microbatch.
///
/// A wait ends when an operator on the thread that began the wait reads a parameter of any Engine. A thread that
/// computes with parameters does not wait for data. OpWatch notifies DataWait of that operator (parameter_is_read). If
/// no OpWatch lives, nothing is measured unless `look` was called. In that case the thread looks at the inputs of its
/// operators during a wait, and LibTorch allocates memory a few times to show these inputs. Otherwise only the first
/// wait of a thread allocates memory.
class DataWait {
 public:
  using Clock = std::chrono::steady_clock;

  DataWait();
  /// The destructor may run on another thread than `begin` did.
  ~DataWait();
  DataWait(const DataWait&) = delete;
  DataWait& operator=(const DataWait&) = delete;

  /// From now on, waits that this object begins are measured even if no OpWatch lives.
  void look();
  bool looks() const;
  /// Begins a wait: this thread is without data from `now` on. If a wait is already under way, the call does nothing.
  void begin(Clock::time_point now);
  /// Ends the wait that is under way, if there is one.
  void end();
  /// Returns the seconds of all waits that ended since the last call; NaN if none was measured.
  double take();

  /// OpWatch calls it when an operator on this thread is about to read a parameter.
  static void parameter_is_read();

 private:
  struct Stretch;
  std::shared_ptr<Stretch> stretch_;
};

}  // namespace tessera
