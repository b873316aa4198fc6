#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::oracle {

/// True if the interpreter chosen by CMake can import torch; tests without it are skipped.
bool python_has_torch();

/// Runs a script of this folder on one thread a process, waits for it, and returns what it printed. An error if it
/// fails, or does not end by itself within what takes `at_rest_s` seconds on a machine at rest (tests/support/limits/patience.h):
/// the message holds the end of what it wrote to stderr. `folder` is for that.
absl::StatusOr<std::string> run_python(const std::string& script, const std::vector<std::string>& arguments,
                                       const std::filesystem::path& folder, int at_rest_s);

}  // namespace tessera::oracle
