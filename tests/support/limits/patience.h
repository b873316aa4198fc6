#pragma once

#include <chrono>

namespace tessera {

// Limits of time in tests. A test states how many seconds something takes at most on a machine at rest. The limit
// scales with a reference piece of work that is measured in the same run. The reference takes longer on a machine with
// other load, on a slow machine and under a sanitizer, and the limit grows with it. The limit is never below the
// seconds that the test states.
//
// The reference does the same as ranks: two processes start, compute, wait for each other after each piece of
// computation, and one of them writes to a file. The reference takes kReferenceAtRest seconds on two cores at rest, and
// at least twice as long if two other processes are busy. tests/support/patience.py does the same for Python, and the
// program with_patience runs a command within such a limit.

/// The seconds that the reference took on two cores at rest.
constexpr double kReferenceAtRest = 0.06;

/// Measures the seconds that the reference takes now. Throws std::runtime_error if no process can be started.
double measure_reference_s();

/// Returns how many times longer things take than on a machine at rest, which is at least 1. The function uses the
/// longest time of the reference that this process has measured. It measures the reference if this process has not done
/// so yet.
double slowness();

/// Returns the limit for a piece of work that takes `at_rest` on a machine at rest. Calls that need the limit before
/// the work begins use this function. A Deadline measures only if `at_rest` was not enough, so it costs nothing in most
/// runs.
inline std::chrono::milliseconds patient(std::chrono::duration<double> at_rest) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(at_rest * slowness());
}
inline double patient_s(double at_rest_s) { return at_rest_s * slowness(); }

/// A limit that begins when it is made:
///     for (Deadline limit(10s); !is_there();) ASSERT_FALSE(limit.passed());
/// Only one thread at a time may use a Deadline.
class Deadline {
 public:
  explicit Deadline(std::chrono::duration<double> at_rest);

  /// Returns whether the machine had enough time. Measures the reference whenever the limit that is known so far has
  /// passed.
  bool passed();
  /// Returns the seconds since the limit began.
  double seconds() const;

 private:
  const std::chrono::steady_clock::time_point begin_;
  const double at_rest_s_;
  double limit_s_;
};

/// Returns whether something that took `seconds` was done in time, if a machine at rest needs at most `at_rest_s`.
bool in_time(double seconds, double at_rest_s);

}  // namespace tessera
