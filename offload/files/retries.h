#pragma once

#include <cerrno>

namespace tessera {

/// The most times that a call is made again after it was interrupted or could not be served.
inline constexpr int kMostRetries = 100;

/// Returns whether a call that failed with the errno `error` is made again.
inline bool is_worth_retrying(int error) { return error == EINTR || error == EAGAIN; }

/// Makes a call again while that is worth it. The call returns a negative errno where it fails.
template <typename Call>
int retried(const Call& call) {
  int got = call();
  for (int tries = 0; got < 0 && is_worth_retrying(-got) && tries < kMostRetries; ++tries) got = call();
  return got;
}

}  // namespace tessera
