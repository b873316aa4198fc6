#pragma once

#include <cerrno>

namespace tessera {

/// How many times a call is made again that was interrupted, or that could not be served now.
inline constexpr int kMostRetries = 100;

/// `error` is an errno.
inline bool is_worth_retrying(int error) { return error == EINTR || error == EAGAIN; }

/// Makes a call again while that is worth it. The call returns a negative errno where it fails.
template <typename Call>
int retried(const Call& call) {
  int got = call();
  for (int tries = 0; got < 0 && is_worth_retrying(-got) && tries < kMostRetries; ++tries) got = call();
  return got;
}

}  // namespace tessera
