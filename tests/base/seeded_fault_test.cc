// Tests the variable that switches a seeded fault on.

#include "runtime/base/seeded_fault.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tessera/exit_code.h"

namespace tessera {
namespace {

/// Ends the process with exit code 1 if `which` is switched on, or else with 0. A process reads the variable only once.
[[noreturn]] void end_with(const char* variable, SeededFault which) {
  setenv("TESSERA_SEEDED_FAULT", variable, /*replace=*/1);
  const bool first = seeded_fault(which);
  setenv("TESSERA_SEEDED_FAULT", "", 1);
  std::_Exit(first && seeded_fault(which) ? 1 : 0);
}

class SeededFaultDeathTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef TESSERA_SEEDED_FAULTS
    GTEST_SKIP() << "a build without them";
#endif
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // the death test runs the program again from its start
  }
};

TEST_F(SeededFaultDeathTest, VariableSwitchesOnOnlyTheNamedFault) {
  EXPECT_EXIT(end_with("no_last_gap", SeededFault::kNoLastGap), ::testing::ExitedWithCode(1), "");
  EXPECT_EXIT(end_with("no_last_gap", SeededFault::kEpochsAlike), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(end_with("", SeededFault::kNoLastGap), ::testing::ExitedWithCode(0), "");
}

TEST_F(SeededFaultDeathTest, UnknownNameEndsTheProcess) {
  EXPECT_EXIT(end_with("no_such", SeededFault::kNoLastGap),
              ::testing::ExitedWithCode(static_cast<int>(ExitCode::kConfig)), "there is no fault \"no_such\"");
}

}  // namespace
}  // namespace tessera
