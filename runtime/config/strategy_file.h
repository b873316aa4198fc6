#pragma once

#include <absl/status/statusor.h>

#include <filesystem>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Strategy::from_file and Strategy::from_json for code that uses statuses. The exit codes of the errors are the same:
/// 66, 77, 78.
absl::StatusOr<Strategy> read_strategy(const std::filesystem::path& path);
absl::StatusOr<Strategy> parse_strategy(const std::string& text, const std::string& name = "strategy");

/// Checks a strategy that a program has set field by field against the ranges and rules of the file. The status (exit
/// code 78) lists every value that breaks a range or a rule, by its JSON pointer.
absl::Status check_strategy(const Strategy& strategy);

/// Returns `strategy`, changed if the environment variable TESSERA_STRICT is "1" (`tessera launch --strict`). Each rank
/// then has private copies, as on separate hosts, and "check.values" is set on the CPU. The ranks of one machine then
/// show the same errors as the ranks of two machines. Code that reads files or makes Engines calls this function.
Strategy as_launched(Strategy strategy);

}  // namespace tessera
