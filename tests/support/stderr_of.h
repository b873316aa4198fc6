#pragma once

#include <gtest/gtest.h>

#include <string>

#include "runtime/base/log.h"

namespace tessera::testing {

/// Runs `body`, and returns the text that the process wrote to stderr during this time. Afterwards the level and the
/// rank of the log are restored.
template <typename Body>
std::string stderr_of(const Body& body) {
  const LogLevel level = log_level();
  const LogRank rank = log_rank();
  ::testing::internal::CaptureStderr();
  body();
  set_log_level(level);
  set_log_rank(rank);
  return ::testing::internal::GetCapturedStderr();
}

}  // namespace tessera::testing
