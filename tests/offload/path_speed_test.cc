// Tests the measurement of disks, and how records are divided among directories by their speeds.

#include "offload/io/path_speed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Le;

TEST(PathSpeed, SlowDiskGetsFewerRecords) {
  const ScratchFolder fast, slow;
  const std::vector<std::string> paths = {slow.path(), fast.path()};
  // The delay is so long that the disk's own time does not matter.
  const auto delay_ms = static_cast<int>(patient(std::chrono::milliseconds(60)).count());
  ScopedFaults faults(
      {{.site = FaultSite::kCqe, .path = slow.path(), .every = 1, .action = FaultAction::kDelay, .number = delay_ms},
       {.site = FaultSite::kWrite, .path = slow.path(), .every = 1, .action = FaultAction::kDelay, .number = delay_ms},
       {.site = FaultSite::kRead, .path = slow.path(), .every = 1, .action = FaultAction::kDelay, .number = delay_ms}});
  const auto weights = path_weights(paths, {.who = "rank 0", .record_bytes = 65536, .records = 4});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_THAT(*weights, ElementsAre(AllOf(Ge(0.125), Le(0.5)), 1.0));
}

TEST(PathSpeed, SameDiskTwiceIsShared) {
  const ScratchFolder folder;
  const std::vector<std::string> one = {folder.path()}, none;
  EXPECT_THAT(*path_weights(one, {}), ElementsAre(1.0));
  EXPECT_THAT(*path_weights(none, {}), IsEmpty());
  const std::vector<std::string> twice = {folder.path(), folder.path()};
  const auto weights = path_weights(twice, {.who = "rank 0", .record_bytes = 1 << 20, .records = 4});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(*std::max_element(weights->begin(), weights->end()), 1.0);
  EXPECT_GE(*std::min_element(weights->begin(), weights->end()), 0.125);
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(PathSpeed, ErrorsNameTheDirectory) {
  const ScratchFolder folder;
  const std::vector<std::string> missing = {folder.path(), folder.file("nowhere")};
  const auto status = path_weights(missing, {.who = "rank 3"}).status();
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 3"), HasSubstr("nowhere")));
  const ScratchFolder other;
  const std::vector<std::string> both = {folder.path(), other.path()};
  ScopedFaults faults(
      {{.site = FaultSite::kCqe, .path = other.path(), .nth = 2, .action = FaultAction::kErrno, .number = EIO},
       {.site = FaultSite::kWrite, .path = other.path(), .nth = 99, .action = FaultAction::kErrno, .number = EIO}});
  const auto broken = path_weights(both, {.who = "rank 3", .record_bytes = 65536, .records = 4}).status();
  EXPECT_EQ(exit_code_of(broken), ExitCode::kIo);
  EXPECT_THAT(message_of(broken), AllOf(HasSubstr("rank 3"), HasSubstr(other.path())));
}

}  // namespace
}  // namespace tessera
