// Tests exit codes of errors and statuses, and the macros that return the first failure.

#include "runtime/base/status.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Error, StatusKeepsItsExitCodeAndMessage) {
  for (const ExitCode code : {ExitCode::kUsage, ExitCode::kCorruptData, ExitCode::kNoInput, ExitCode::kUnavailable,
                              ExitCode::kInternal, ExitCode::kOsResource, ExitCode::kCannotCreate, ExitCode::kIo,
                              ExitCode::kPeerLost, ExitCode::kPermission, ExitCode::kConfig}) {
    const absl::Status status = make_error(code, "why");
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(exit_code_of(status), code);
    EXPECT_EQ(message_of(status), "why");
  }
  EXPECT_EQ(exit_code_of(absl::OkStatus()), ExitCode::kOk);
}

TEST(Error, ForeignStatusesGetTheNearestExitCode) {
  EXPECT_EQ(exit_code_of(absl::DeadlineExceededError("")), ExitCode::kPeerLost);
  EXPECT_EQ(exit_code_of(absl::NotFoundError("")), ExitCode::kNoInput);
  EXPECT_EQ(exit_code_of(absl::UnimplementedError("")), ExitCode::kInternal);
}

absl::StatusOr<int> half(int x) {
  if (x % 2 != 0) return make_error(ExitCode::kConfig, "odd");
  return x / 2;
}
absl::StatusOr<int> quarter(int x) {
  TESSERA_ASSIGN_OR_RETURN(const int first, half(x));
  TESSERA_ASSIGN_OR_RETURN(const int second, half(first));
  return second;
}
absl::Status is_even(int x) {
  TESSERA_RETURN_IF_ERROR(half(x).status());
  return absl::OkStatus();
}

TEST(Error, MacrosReturnTheFirstFailure) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(exit_code_of(quarter(6).status()), ExitCode::kConfig);
  EXPECT_TRUE(is_even(2).ok());
  EXPECT_EQ(message_of(is_even(3)), "odd");
}

}  // namespace
}  // namespace tessera
