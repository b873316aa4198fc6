#pragma once

#include <gtest/gtest.h>

#include <string>

#include "runtime/base/log.h"

namespace tessera::testing {

/// Runs `body` and returns what the process wrote to stderr while `body` ran. The log's level and rank are restored
/// afterwards.
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
