#pragma once

#include <absl/status/status.h>

namespace tessera {

/// Installs the rules (fault_text.h) of a variable such as TESSERA_TEST_FAULTS="write path=scratch nth=3 errno=ENOSPC;
/// read every=2 short=512" for the rest of the process, at the first call. So whole programs can be tested without
/// being changed.
///
/// Only builds with the CMake option TESSERA_FAULTS can make faults (fault_environment_on.cc). Other builds return an
/// error when the variable is set (fault_environment_off.cc); otherwise a test could pass although the fault never
/// occurred. All code that opens a file in `offload/` calls this first. It is thread-safe. Errors: 78 for a wrong rule,
/// or if the variable is set in a build that cannot make faults.
absl::Status take_faults_from_environment();

}  // namespace tessera
