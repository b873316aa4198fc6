#pragma once

#include <cerrno>

namespace tessera {

/// A call that was interrupted, or that could not be served now, is made again, so often at most.
inline constexpr int kMostRetries = 100;

/// `error`: an errno.
inline bool is_worth_retrying(int error) { return error == EINTR || error == EAGAIN; }

/// Of a call that returns a negative errno.
template <typename Call>
int retried(const Call& call) {
  int got = call();
  for (int tries = 0; got < 0 && is_worth_retrying(-got) && tries < kMostRetries; ++tries) got = call();
  return got;
}

}  // namespace tessera
