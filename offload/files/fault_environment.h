#pragma once

#include <absl/status/status.h>

namespace tessera {

/// Installs the rules (fault_text.h) of the environment variable TESSERA_TEST_FAULTS, such as "write path=scratch nth=3
/// errno=ENOSPC; read every=2 short=512". The first call installs them for the rest of the process. So whole programs
/// can be tested without being changed.
///
/// Only builds with the CMake option TESSERA_FAULTS can make faults (fault_environment_on.cc). Other builds return an
/// error when the variable is set (fault_environment_off.cc); otherwise a test could pass although the fault never
/// occurred. Code that opens files through file_calls.h calls this function first. The function is thread-safe. Errors:
/// 78 for a wrong rule, or if the variable is set in a build that cannot make faults.
absl::Status take_faults_from_environment();

}  // namespace tessera
