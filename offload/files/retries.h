#pragma once

#include <cerrno>

namespace tessera {

/// The largest number of times that a call is repeated after it was interrupted (EINTR) or could not be served yet
/// (EAGAIN).
inline constexpr int kMostRetries = 100;

/// Returns whether a call that failed with the errno `error` should be repeated.
inline bool is_worth_retrying(int error) { return error == EINTR || error == EAGAIN; }

/// Makes a call, and repeats it as long as is_worth_retrying is true for its error, at most kMostRetries times. The
/// call returns a negative errno if it fails.
template <typename Call>
int retried(const Call& call) {
  int got = call();
  for (int tries = 0; got < 0 && is_worth_retrying(-got) && tries < kMostRetries; ++tries) got = call();
  return got;
}

}  // namespace tessera
