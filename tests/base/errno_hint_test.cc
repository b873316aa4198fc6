// Tests the remedies that errors name for each errno.

#include "runtime/base/errno_hint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ErrnoHint, SameErrnoGivesOtherHintsForReadingAndWriting) {
  EXPECT_THAT(reason_of_reading(ENOENT), HasSubstr("hint: check the path"));
  EXPECT_EQ(reason_of_writing(ENOENT),
            "No such file or directory (errno 2). [T0408] hint: create its folder first (mkdir -p)");
  EXPECT_THAT(reason_of_reading(EACCES), HasSubstr("hint: let this user read it"));
  EXPECT_THAT(reason_of_writing(EACCES), HasSubstr("hint: name a folder that this user may write to"));
}

TEST(ErrnoHint, FullDiskSaysHowManyBytesToFree) {
  EXPECT_THAT(reason_of_writing(ENOSPC), EndsWith("hint: free some space there, or name another folder"));
  EXPECT_THAT(reason_of_writing(ENOSPC, 4096), EndsWith("hint: free 4.00 KiB there, or name another folder"));
}

TEST(ErrnoHint, EagainMeansBusyDeviceForFilesElseTheProcessLimit) {
  EXPECT_THAT(reason_of_writing(EAGAIN), HasSubstr("the device was busy"));
  EXPECT_THAT(reason_of_reading(EAGAIN), HasSubstr("the device was busy"));
  EXPECT_THAT(reason_of(EAGAIN), HasSubstr("ulimit -u"));
}

TEST(ErrnoHint, OpenFileLimitIsNamedForEveryOperation) {
  for (const std::string& reason : {reason_of(EMFILE), reason_of_reading(EMFILE), reason_of_writing(EMFILE)})
    EXPECT_THAT(reason, HasSubstr("hint: raise the limit of open files (ulimit -n)"));
}

TEST(ErrnoHint, HintsHaveNoPlaceholderLeftForAnyErrno) {
  for (int error = 1; error < 140; ++error) {
    EXPECT_THAT(reason_of_writing(error), Not(HasSubstr("{}"))) << error;
    EXPECT_THAT(reason_of_reading(error), Not(HasSubstr("{}"))) << error;
  }
}

TEST(ErrnoHint, CreationFailureExitsByPermissionLimitOrPath) {
  EXPECT_EQ(exit_code_of_creating(EROFS), ExitCode::kPermission);
  EXPECT_EQ(exit_code_of_creating(EACCES), ExitCode::kPermission);
  EXPECT_EQ(exit_code_of_creating(EMFILE), ExitCode::kOsResource);
  EXPECT_EQ(exit_code_of_creating(EFBIG), ExitCode::kIo);
  EXPECT_EQ(exit_code_of_creating(ENOSPC), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of_creating(EPROTO), ExitCode::kCannotCreate);
}

TEST(ErrnoHint, LimitIsRecognisedInTextsOfOtherLibraries) {
  EXPECT_EQ(limit_in("[../gloo/transport/tcp/listener.cc:30] accept: Too many open files"), EMFILE);
  EXPECT_EQ(limit_in("Resource temporarily unavailable"), EAGAIN);
  EXPECT_EQ(limit_in("Connection refused"), 0);
  EXPECT_EQ(reason_of(EIO), "Input/output error (errno 5)");
  EXPECT_EQ(limit_hint(ENOENT), "");
  EXPECT_EQ(exit_code_of_errno(EFBIG), ExitCode::kIo);
  EXPECT_EQ(exit_code_of_errno(EAGAIN), ExitCode::kOsResource);
  EXPECT_EQ(exit_code_of_errno(ENXIO), ExitCode::kCannotCreate) << "a socket stands in a file's place";
}

}  // namespace
}  // namespace tessera
