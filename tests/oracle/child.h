#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::oracle {

/// Returns whether the interpreter that CMake chose has these modules, such as {"torch", "transformers"}. The function
/// only looks for the modules, since an import would take seconds. Tests are skipped if a module is missing.
bool python_has(const std::vector<std::string>& modules);
bool python_has_torch();

/// Runs a script of this folder with one thread per process, waits for it, and returns its output. Returns an error if
/// the script fails, or if it does not end in time. `at_rest_s`: the seconds that the script takes at most on a machine
/// at rest; the limit grows with the load of the machine (tests/support/limits/patience.h). The message contains the
/// end of the script's stderr, which is stored in `folder`.
absl::StatusOr<std::string> run_python(const std::string& script, const std::vector<std::string>& arguments,
                                       const std::filesystem::path& folder, int at_rest_s);

}  // namespace tessera::oracle
