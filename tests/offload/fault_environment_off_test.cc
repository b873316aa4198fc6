// Tests the behaviour of a release build: this program contains fault_environment_off.cc instead of the file that reads
// rules for faults.
#include <gtest/gtest.h>

#include <cstdlib>

#include "offload/files/atomic_file.h"
#include "offload/files/block_file.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

TEST(FaultEnvironmentOff, VariableIsRefusedInABuildWithoutFaults) {
  ScratchFolder folder;
  ::setenv("TESSERA_TEST_FAULTS", "read nth=1 errno=EIO", 1);
  const absl::Status written = write_file_atomically(folder.file("x"), {}, "test");
  EXPECT_EQ(exit_code_of(written), ExitCode::kConfig);
  EXPECT_NE(message_of(written).find("-DTESSERA_FAULTS=ON"), std::string::npos) << written;
  const auto file = BlockFile::create({.directory = folder.path(), .bytes = 4096, .who = "test"});
  EXPECT_EQ(exit_code_of(file.status()), ExitCode::kConfig);
  EXPECT_TRUE(folder.names().empty());
  ::setenv("TESSERA_TEST_FAULTS", "", 1);
  EXPECT_TRUE(write_file_atomically(folder.file("x"), {}, "test").ok());
  ::unsetenv("TESSERA_TEST_FAULTS");
  EXPECT_TRUE(write_file_atomically(folder.file("x"), {}, "test").ok());
}

}  // namespace
}  // namespace tessera
