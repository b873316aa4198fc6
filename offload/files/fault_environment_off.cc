#include <cstdlib>

#include "offload/files/fault_environment.h"
#include "runtime/base/status.h"

namespace tessera {

absl::Status take_faults_from_environment() {
  const char* const text = std::getenv("TESSERA_TEST_FAULTS");
  if (text == nullptr || *text == '\0') return absl::OkStatus();
  return make_error(
      ExitCode::kConfig,
      "TESSERA_TEST_FAULTS is set, but this build cannot make faults. [T0372] hint: unset it, or build Tessera with "
      "-DTESSERA_FAULTS=ON");
}

}  // namespace tessera
